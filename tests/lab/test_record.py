"""CIFAR-10 without batch statistics: the net, the optimizer made for capture, and the driver, at toy size."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equinorm.cli import main as cli
from equinorm.lab.record import main, picture, plans, sizes
from equinorm.lab.record.config import METHODS, Config, method, rates
from equinorm.lab.record.data import Pixels, addresses, as_pixels, normalized, read_cifar10, toy_images
from equinorm.lab.record.log import Log
from equinorm.lab.record.net import net_of, whitening_weights
from equinorm.lab.record.optimizer import FlatOptimizer, schedule
from equinorm.lab.record.plans import record_config, refined
from equinorm.lab.record.runner import OutOfTimeError, Runner
from equinorm.lab.record.sizes import SECOND_NET, chosen_rates, chosen_setting
from equinorm.lab.record.training import Training, together
from equinorm.lab.report import energies, overview
from equinorm.unitfilters.functional import orthogonalize, project_
from equinorm.unitfilters.muon import Muon

TOY = {"widths": (8, 16, 16), "groups": 4, "batch": 20, "epochs": 1.0, "dtype": "float32"}


@pytest.fixture(scope="module")
def images():
    return toy_images("cpu", 100)


@pytest.fixture(scope="module")
def pixels(images):
    return Pixels(images.train, images.train_labels, torch.float32)


def training(images, pixels, norm="unit", **changes):
    return Training(method(norm, **{**TOY, **changes}), images, pixels)


# -- data --------------------------------------------------------------------------------------------------------------


def test_windows_are_padded_moved_and_flipped_images(images, pixels):
    at, labels = addresses(images.train_labels, 20, 10, torch.Generator().manual_seed(1))
    plain = normalized(images.train, torch.float32)
    padded = F.pad(plain, (2, 2, 2, 2), mode="reflect")
    flips = torch.zeros(2, 100)
    for step in range(10):
        windows = pixels.windows(at[step])
        assert windows.is_contiguous(memory_format=torch.channels_last)
        for window, label, address in zip(windows, labels[step], at[step].tolist(), strict=True):
            image, inside = divmod(address, 36 * 36)
            dy, dx = divmod(inside, 36)
            flipped, image = divmod(image, 100)
            source = padded[image].flip(-1) if flipped else padded[image]
            assert torch.equal(window, source[:, dy : dy + 32, dx : dx + 32])
            assert label == images.train_labels[image]
            flips[step // 5, image] = 1 + flipped
    # every image once an epoch, and the other way round in the next one
    assert torch.equal(flips.sum(0), torch.full((100,), 3.0))


def test_reads_the_official_files(tmp_path, images):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    record = torch.cat([images.train_labels[:1].byte(), images.train[0].reshape(-1)])
    rows = record.repeat(10000, 1).numpy()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    read = read_cifar10(tmp_path, "cpu")
    assert torch.equal(read.train[49999], images.train[0])
    assert read.test.shape == (10000, 3, 32, 32)
    assert len(read.held_out().train) == 45000
    assert len(read.held_out().test) == 5000
    (folder / "test_batch.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"test_batch\.bin is missing"):
        read_cifar10(tmp_path, "cpu")


# -- the net -----------------------------------------------------------------------------------------------------------


def test_whitened_patches_are_uncorrelated_and_of_unit_variance():
    """Against a plain loop over patches, in float64."""
    x = normalized(toy_images("cpu", 60).train, torch.float32)
    weights = whitening_weights(x, eps=0.0)
    assert weights.shape == (24, 4, 2, 2)
    assert torch.equal(weights[:12], -weights[12:])
    assert torch.equal(weights[:, 3], torch.zeros(24, 2, 2))
    patches = [image[:3, i : i + 2, j : j + 2].reshape(-1) for image in x for i in range(31) for j in range(31)]
    out = torch.stack(patches).double() @ weights[:12, :3].reshape(12, -1).double().T
    moments = out.T @ out / len(patches)
    torch.testing.assert_close(moments, torch.eye(12, dtype=torch.float64), atol=1e-2, rtol=0)


@pytest.mark.parametrize("norm", ["unit", "msr", "ws_agc"])
def test_the_start_from_data_is_centred_with_one_deviation_per_layer(norm, images, pixels):
    run = training(images, pixels, norm)
    run.reset(0)
    run.prepare()
    seen = []
    for stage in run.net.stages:
        stage.activation = lambda y: seen.append(y) or F.silu(y)
    run.net.eval()(normalized(images.train, torch.float32))
    assert len(seen) == 6
    for y in seen:
        variance, mean = torch.var_mean(y, (0, 2, 3), correction=0)
        torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-4, rtol=0)
        torch.testing.assert_close(variance.mean(), torch.ones(()), atol=1e-3, rtol=0)
    # the optimizer starts from the same gains and offsets
    torch.testing.assert_close(run.optimizer.others, run.optimizer.half[1])


def test_the_second_net_is_a_resnet_20(images):
    """By its own count of layers and parameters (He et al. 2016, table 6: 0.27 million), and by a block written out."""
    net = net_of(method("batchnorm", **SECOND_NET))
    assert sum(1 for p in net.parameters() if p.ndim == 4) + 1 == 20
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(0.27e6, rel=0.02)
    net.eval()
    read = {}
    for i, stage in enumerate(net.stages):
        stage.register_forward_pre_hook(lambda _, inputs, i=i: read.update({i: inputs[0]}))
    net(torch.randn(2, 4, 32, 32))

    def branch(first):
        return net.stages[first + 1](F.gelu(net.stages[first](read[first])))

    read = dict(read)  # what is called from here on does not count
    torch.testing.assert_close(read[3], F.gelu(read[1] + branch(1)))
    around = F.pad(read[7][:, :, ::2, ::2], (0, 0, 0, 0, 0, 16))
    torch.testing.assert_close(read[9], F.gelu(around + branch(7)))


def test_equinorm_reads_pixels_where_its_first_layer_reads_images(images):
    """It divides by what the means of its inputs give: the second net was not finite on centred images."""
    x = normalized(images.train, torch.float32)
    assert as_pixels(x)[:, 3].eq(0).all()
    torch.testing.assert_close(255 * as_pixels(x)[:, :3], images.train.float(), atol=1e-3, rtol=0)
    largest = {}
    for pixels in (False, True):
        torch.manual_seed(0)
        net = net_of(method("equinorm", **{**SECOND_NET, "pixels": pixels})).train()
        net.stages[0].register_forward_hook(
            lambda *_, pixels=pixels: largest.update({pixels: float(_[2].detach().abs().max())})
        )
        # channels whose means are small beside their deviations, as those of normalized photographs are
        net(x - x.mean((0, 2, 3), keepdim=True) if not pixels else x)
    assert largest[True] < 10
    assert largest[False] > 1000


def test_matrices_in_one_stack_are_orthogonalized_each_by_itself(images, pixels):
    """Zeros around the smaller ones must not change them."""
    optimizer = training(images, pixels).optimizer
    direction = torch.randn_like(optimizer.filters)
    each = [orthogonalize(stack, 3).reshape(-1) for stack in optimizer._by_shape(direction)]
    assert len(each) > 2
    torch.testing.assert_close(optimizer._orthogonalized(direction), torch.cat(each), atol=1e-5, rtol=1e-4)


def test_what_gained_alone_is_tried_together(images, tmp_path):
    run = runner(images, tmp_path)
    tries = sizes._tries("unit", {"factor": 2.0, "rule": "root"})
    better = {"twice the rates": 81, "half the rates": 79, "noise 0": 82, "noise 0.1": 83, "random filters": 79}

    def log(setting, accuracy):
        for size in sizes.CHOSEN_AT:
            config = run.adapted(sizes._setting_run(run, "unit", setting, size, {}))
            row = {"key": run.key(config, 0, "held-out"), "part": "settings", "method": "unit", "images": "toy"}
            run.log.append(row | {"config": dataclasses.asdict(config), "accuracy": accuracy})

    for name, setting in tries.items():
        log(setting, better.get(name, 80))
    assert sizes._together(run, "settings", "unit", tries, {}) == {"factor": 4.0, "rule": "root", "noise": 0.1}
    assert chosen_setting(run, "unit") == {
        "factor": 2.0,
        "rule": "root",
        "noise": 0.1,
        "dirac": True,
        "pixels": False,
    }
    # where nothing but the rates gained, they go further
    rates_alone = {name: tries[name] for name in ("as chosen", "half the rates", "twice the rates")}
    assert sizes._together(run, "settings", "unit", rates_alone, {}) == {"factor": 8.0, "rule": "root"}


def test_filters_keep_unit_length_and_zero_mean(images, pixels):
    run = training(images, pixels, centred=True)
    run.train(0)
    for stage in run.net.stages:
        filters = stage.weight.flatten(1)
        torch.testing.assert_close(filters.norm(dim=1), torch.ones(len(filters)))
        torch.testing.assert_close(filters.mean(1), torch.zeros(len(filters)), atol=1e-6, rtol=0)


def test_statistics_anew_are_those_of_all_images(images, pixels):
    run = training(images, pixels, "batchnorm")
    run.train(0)
    run.renew_statistics(images=100, batch=50)
    x = normalized(images.train, torch.float32)
    x = run.net.activation(F.conv2d(x, run.net.whitening) + run.net.whitening_bias.view(1, -1, 1, 1))
    y = F.max_pool2d(run.net.stages[0].convolved(x), 2)
    torch.testing.assert_close(run.net.stages[0].mean, y.mean((0, 2, 3)))
    assert run.net.stages[0].momentum == rates(run.config).statistics_momentum


# -- the optimizer -----------------------------------------------------------------------------------------------------


def test_a_step_is_muon_sgd_and_projection():
    """Five steps beside equinorm's Muon, torch's SGD and `project_`, with clipping and decay."""
    config = Config(**TOY, loss_scale=4.0, clip=3.0)
    torch.manual_seed(0)
    net = net_of(config)
    plain = copy.deepcopy(net)
    optimizer = FlatOptimizer(net, config, torch.float32, steps=8)
    own, named = rates(config), dict(plain.named_parameters())
    filters = [p for p in named.values() if p.ndim == 4]
    for p in filters:
        project_(p.data)
    muon = Muon(filters, lr=own.filters, momentum=config.filters_momentum, steps=config.newton_schulz)
    groups = [
        {"params": [p for n, p in named.items() if n.endswith("offset")], "lr": own.offsets},
        {"params": [plain.whitening_bias], "lr": own.whitening},
        {"params": [plain.head], "lr": own.head},
    ]
    for group in groups:
        group["weight_decay"] = own.decay / group["lr"]
    sgd = torch.optim.SGD(groups, momentum=config.momentum, nesterov=True)
    first = [group["lr"] for group in sgd.param_groups]
    multipliers = schedule(8, config.warmup)
    for t in range(5):
        gradients = {name: torch.randn_like(p) for name, p in named.items()}
        optimizer.step([4.0 * gradients[name] for name in optimizer.names], torch.tensor([t]))
        for name, p in named.items():
            p.grad = gradients[name].clone()
        nn.utils.clip_grad_norm_(named.values(), own.clip)
        muon.param_groups[0]["lr"] = own.filters * float(multipliers[t])
        for group, lr in zip(sgd.param_groups, first, strict=True):
            group["lr"] = lr * float(multipliers[t])
        muon.step()
        sgd.step()
        for p in filters:
            project_(p.data)
    for name, p in net.named_parameters():
        torch.testing.assert_close(p, named[name], atol=2e-5, rtol=1e-4)


def test_adaptive_clipping_by_filter():
    config = method("ws_agc", **TOY, factor=1000.0)
    torch.manual_seed(0)
    optimizer = FlatOptimizer(net_of(config), config, torch.float32, steps=4)
    gradient = torch.randn_like(optimizer.filters) * torch.linspace(0, 100, len(optimizer.filters))
    clipped = optimizer._clipped_by_filter(gradient, 0.02)
    for g, c, w in zip(*map(optimizer._by_shape, (gradient, clipped, optimizer.filters)), strict=True):
        longest = 0.02 * config.batch * w.norm(dim=-1)
        torch.testing.assert_close(c.norm(dim=-1), torch.minimum(g.norm(dim=-1), longest))


def test_mean_shift_rejection_centres_gradients():
    config = method("msr", **TOY)
    optimizer = FlatOptimizer(net_of(config), config, torch.float32, steps=4)
    gradient = torch.randn_like(optimizer.filters)
    for centred in optimizer._by_shape(optimizer._centred(gradient, z=1.0)):
        means = centred.view(*centred.shape[:2], 9, -1).mean(2)
        torch.testing.assert_close(means, torch.zeros_like(means), atol=1e-6, rtol=0)


def test_schedule_rises_and_falls():
    up_and_down = schedule(100, 0.15)
    assert up_and_down[0] == pytest.approx(1 / 15)
    assert up_and_down.argmax() in (14, 15)
    assert up_and_down[-1] == pytest.approx(1 / 85)
    assert schedule(100, 0.0)[0] == 1.0
    assert schedule(100, 0.0, last=40)[40:].max() == 0.0


# -- the rule ----------------------------------------------------------------------------------------------------------


def test_the_rule_for_other_batches():
    at_base, small = rates(Config()), rates(Config(batch=10))
    for field in ("filters", "offsets", "head", "whitening", "clip"):
        assert getattr(small, field) == pytest.approx(getattr(at_base, field) / 10), field
    assert small.decay == pytest.approx(at_base.decay / 100)
    kept = rates(Config(batch=10, rule="sum"))
    assert kept.filters == pytest.approx(at_base.filters / 10)
    assert kept.head == at_base.head
    # a hundred small batches renew as much of the running statistics as one of the base
    momentum = rates(method("batchnorm", batch=20)).statistics_momentum
    assert (1 - momentum) ** 100 == pytest.approx(0.6)
    assert rates(method("ws_agc", batch=10)).agc == pytest.approx(0.2)
    assert rates(Config(factor=2.0)).head == 2 * at_base.head


def test_an_unknown_method_is_named():
    with pytest.raises(ValueError, match="no method is called 'layernorm': choose from unit, batchnorm"):
        method("layernorm")


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", [{}, {**SECOND_NET, "widths": (8, 16, 16)}], ids=["airbench", "resnet20"])
@pytest.mark.parametrize("norm", METHODS)
def test_every_method_trains(norm, net, images, pixels):
    options = {"epochs": 0.4, "rule": "sum", **net}
    run = training(images, pixels, norm, **options)
    before = run.optimizer.filters.clone(), run.optimizer.others.clone()
    run.train(0)
    assert run.steps == 2
    assert run.finite()
    assert not torch.equal(before[0], run.optimizer.filters)
    assert not torch.equal(before[1], run.optimizer.others)
    assert 0.0 <= run.accuracy() <= 100.0
    again = training(images, pixels, norm, **options)
    again.train(0)
    assert torch.equal(again.optimizer.filters, run.optimizer.filters)


def test_a_net_that_is_used_again_is_a_new_one(images, pixels):
    one = training(images, pixels, epochs=0.6)
    one.train(0)
    first = one.optimizer.filters.clone()
    one.train(1, one.config.but(factor=0.5))
    assert not torch.equal(first, one.optimizer.filters)
    one.train(0)
    assert torch.equal(first, one.optimizer.filters)


def test_the_whitening_bias_stops_after_its_epochs(images, pixels):
    run = training(images, pixels, "batchnorm", epochs=2.0, whitening_epochs=1.0, decay=0.0)
    run.reset(0)
    run.prepare()
    run.advance(run.whitening_steps)
    bias, head = run.net.whitening_bias.detach().clone(), run.net.head.detach().clone()
    run.advance(run.steps)
    assert run.done == 10
    assert torch.equal(bias, run.net.whitening_bias)
    assert not torch.equal(head, run.net.head)


def test_side_by_side_is_one_after_another(images, pixels):
    runs = [training(images, pixels, norm, epochs=0.4) for norm in ("unit", "groupnorm")]
    for run in runs:
        run.reset(3)
        run.prepare()
    together(runs)
    for run in runs:
        alone = training(images, pixels, run.config.norm, epochs=0.4)
        alone.train(3)
        assert torch.equal(alone.optimizer.filters, run.optimizer.filters)


def test_side_by_side_gives_up_in_time(images, pixels):
    run = training(images, pixels, epochs=1.0)
    run.reset(0)
    run.prepare()
    with pytest.raises(TimeoutError, match="side by side"):
        together([run], deadline=0.0, probe=1)


def test_a_large_batch_is_refused(images, pixels):
    with pytest.raises(ValueError, match="a batch of 200 is more than the 100 training images"):
        training(images, pixels, batch=200)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", METHODS)
def test_captured_steps_are_eager_steps(norm):
    images = toy_images("cuda", 400)
    pixels = Pixels(images.train, images.train_labels, torch.float32)
    ends = []
    for mode in ("eager", "captured"):
        # few steps: what rounding differs by grows from step to step, through half precision and Newton and Schulz
        run = training(images, pixels, norm, mode=mode, epochs=0.15, whitening_epochs=0.05, small_part=0.7)
        run.capture()
        run.train(0)
        assert bool(run.graphs) == (mode == "captured")
        ends.append(run.optimizer.filters.clone())
    torch.testing.assert_close(*ends, atol=1e-3, rtol=1e-2)


def test_small_windows_come_first_and_lie_anywhere(images, pixels):
    run = training(images, pixels, epochs=2.0, small_part=0.5, small=26)
    run.reset(0)
    run.prepare()
    assert (run.steps, run.small_steps) == (10, 5)
    inside = run.at % (36 * 36)
    corners = torch.stack([inside // 36, inside % 36])
    assert corners[:, :5].max() == 10
    assert corners[:, 5:].max() == 4
    assert pixels.windows(run.at[0], 26).shape == (20, 4, 26, 26)
    before = run.optimizer.filters.clone()
    run.advance(10)
    assert run.finite()
    assert not torch.equal(before, run.optimizer.filters)
    with pytest.raises(ValueError, match="small_part"):
        training(images, pixels, small_part=1.5)


# -- the driver --------------------------------------------------------------------------------------------------------


def rows_of(folder, part):
    return [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()]


def runner(images, folder, **options):
    return Runner(images, Log(folder), toy=True, verbose=False, **options)


def test_what_is_done_is_not_run_again(images, tmp_path, monkeypatch):
    config = Config(epochs=2)
    rows = runner(images, tmp_path).alone("ladder", "short", config, range(2))
    assert [row["seed"] for row in rows] == [0, 1]
    assert rows[0]["on"] == "held-out"
    assert {"accuracy", "seconds", "step_ms", "commit", "versions", "hardware", "command"} <= set(rows[0])
    monkeypatch.setattr(Training, "train", lambda *_: pytest.fail("it was run again"))
    assert runner(images, tmp_path).alone("ladder", "short", config, range(2)) == json.loads(json.dumps(rows))
    assert len(rows_of(tmp_path, "ladder")) == 2


def test_a_failing_run_is_recorded_and_the_rest_goes_on(images, tmp_path):
    run = runner(images, tmp_path)
    assert run.alone("ladder", "too wide", Config(epochs=2, activation="tanh"), [0]) == []
    (row,) = rows_of(tmp_path, "ladder")
    assert row["failed"] == "KeyError: 'tanh'"
    both = [("wrong", Config(epochs=2, activation="tanh"), 1), ("right", Config(epochs=2), 1)]
    (good,) = run.side_by_side("batch", both, "test")
    assert good["name"] == "right"
    # failures count as done, until they are asked for again
    assert Log(tmp_path).get(row["key"]) == row
    assert Log(tmp_path, retry=True).get(row["key"]) is None


def test_what_cannot_be_captured_is_run_eagerly(images, tmp_path, monkeypatch):
    def fail(self):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Training, "capture", fail)
    run = runner(images, tmp_path)
    (row,) = run.alone("ladder", "short", Config(epochs=2), [0])
    assert not row["captured"]
    assert run.alone("ladder", "compiled", Config(epochs=2, mode="compiled"), [0]) == []


def test_nothing_starts_that_has_no_time(images, tmp_path):
    run = runner(images, tmp_path, minutes=0)
    with pytest.raises(OutOfTimeError, match="ladder: short"):
        run.alone("ladder", "short", Config(epochs=2), [0])
    with pytest.raises(OutOfTimeError):
        run.side_by_side("batch", [("one", Config(epochs=2), 0)], "test")
    assert not list(tmp_path.iterdir())


def test_half_a_line_is_passed_over(tmp_path):
    (tmp_path / "ladder.jsonl").write_text('{"key": "a", "part": "ladder"}\n{"key": "b", "pa')
    assert [row["key"] for row in Log(tmp_path).rows] == ["a"]


def test_the_rates_with_the_best_mean_are_chosen(images, tmp_path):
    run = runner(images, tmp_path)
    assert chosen_rates(run, "unit") == {"factor": 1.0, "rule": "root"}
    tried = {(1.0, "root"): (80, 70), (2.0, "root"): (79, 73), (4.0, "sum"): (90, 10), (8.0, "sum"): (95,)}
    for (factor, rule), accuracies in tried.items():
        for i, accuracy in enumerate(accuracies):
            row = {"key": f"{factor}{i}", "part": "choose", "method": "unit", "images": "toy", "accuracy": accuracy}
            run.log.append(row | {"config": {"factor": factor, "rule": rule}})
    assert chosen_rates(run, "unit") == {"factor": 2.0, "rule": "root"}


def refined_row(run, accuracy, **changes):
    config = run.adapted(Config(**changes))
    row = {"key": run.key(config, 0, "held-out"), "part": "refine", "on": "held-out", "seed": 0, "finite": True}
    run.log.append(row | {"config": dataclasses.asdict(config), "seconds": config.epochs, "accuracy": accuracy})


def test_the_record_is_the_shortest_run_that_reaches_the_target(images, tmp_path):
    run = Runner(images, Log(tmp_path), verbose=False)
    assert record_config(run) == Config(epochs=30, mode="compiled")
    for epochs in (8, 16, 24):
        refined_row(run, 93.0 + math.log(epochs / 8), epochs=epochs)
    assert record_config(run) == Config(epochs=21, mode="compiled")  # 8 exp(94 + 0.1 - 0.17 - 93) = 20.3


def test_changes_are_kept_where_they_gain_on_top_of_those_kept_before(images, tmp_path):
    run = Runner(images, Log(tmp_path), verbose=False)
    refined_row(run, 93.0, epochs=16)
    refined_row(run, 93.2, epochs=16, dirac=False)
    refined_row(run, 93.9, epochs=16, noise=0.2)  # not on top of the first
    refined_row(run, 93.1, epochs=16, dirac=False, noise=0.2)
    refined_row(run, 93.3, epochs=16, dirac=False, clip=400.0)
    assert refined(run) == {"dirac": False, "clip": 400.0}


def test_a_change_that_gains_stays_for_those_after_it(images, tmp_path, monkeypatch):
    """`refine` tried all of its changes on the first setting, so that nothing was known of two together."""
    run = Runner(images, Log(tmp_path), verbose=False)
    asked = []
    monkeypatch.setattr(run, "alone", lambda part, name, config, seeds: asked.append(config))
    monkeypatch.setattr(plans, "_gain", lambda run, without, changes: 1.0)
    plans.refine(run, 1)
    every = {name: value for changes in plans.CHANGES.values() for name, value in changes.items()}
    assert asked[-3] == Config(epochs=plans.REFINED_AT, **every)


@pytest.mark.slow
def test_the_whole_program_at_toy_size(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--toy", "--device", "cpu", "--out", "out", "--n", "1", "--seeds", "1"]
    arguments += [
        "--config",
        '{"epochs": 1, "mode": "captured"}',
        "--only",
        "check,choose,settings,final,batch,second-net,lengths",
    ]
    assert main(arguments) == 0
    assert "failed" not in capsys.readouterr().out
    lines = {file: file.read_text() for file in (tmp_path / "out").iterdir()}
    assert main([*arguments[:-1], "choose,settings,final,batch,second-net,lengths"]) == 0
    assert lines == {file: file.read_text() for file in (tmp_path / "out").iterdir()}


def test_the_command(tmp_path, capsys):
    assert cli(["record", "--toy", "--n", "1", "--output", str(tmp_path), "--device", "cpu"]) == 0
    *_, unit, twin = capsys.readouterr().out.splitlines()
    assert "without batch statistics" in unit
    assert "BatchNorm twin" in twin
    assert cli(["record", "--n", "0"]) != 0
    assert "--n is how often" in capsys.readouterr().err


def test_a_part_that_does_not_exist(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "everything"])
    assert "no part is called everything" in capsys.readouterr().err


# -- pictures ----------------------------------------------------------------------------------------------------------


def batch_rows(method, accuracies):
    return [
        {"key": f"{method}{size}{seed}", "part": "batch", "on": "test", "method": method, "batch": size, "accuracy": a}
        for size, both in accuracies.items()
        for seed, a in enumerate(both)
    ]


def test_pictures_of_batch_sizes(tmp_path):
    """Also of a method that falls below the axis, whose last number is written."""
    log = Log(tmp_path)
    for name in picture.NAMES:
        for row in batch_rows(name, {128: (90, 91), 2: (88, 89), 1024: (70, 71) if name == "msr" else (90, 92)}):
            log.append(row)
    runs = picture.by_batch(log)
    assert list(runs["unit"]) == [2, 128, 1024]
    assert [row["accuracy"] for row in runs["msr"][1024]] == [70, 71]
    picture.draw_batches(log, tmp_path / "sizes.png")
    overview.draw(runs, {"BatchNorm": 3.0, "ENorm": 0.1}, tmp_path / "overview.png")
    energies.draw([1.0, 9.0], [3.0, 3.0], tmp_path / "energies.png")
    assert all((tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in ("sizes", "overview", "energies"))
