"""The command `equinorm`. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .registry import Method
    from .symmetry import Symmetry
    from .tools.checkpoints import Checkpoint
    from .tools.converting import Outcome

try:
    import tyro
    from tyro.conf import Positional, UseAppendAction
except ImportError:
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print(
            "equinorm: balance, convert, fold, diagnose and reproduce from the command line.\n"
            "Commands need a few packages more than the library: pip install 'equinorm[lab]'"
        )
        sys.exit(0)
    sys.exit("equinorm: the command line needs more than the library: pip install 'equinorm[lab]'")

# -- options that commands share ---------------------------------------------------------------------------------------

arg: Callable[..., Any] = partial(tyro.conf.arg, help_behavior_hint="")  # "(default: None)" says nothing to a reader

Model = Annotated[
    Positional[str],
    arg(
        metavar="MODEL",
        help="module:callable, file.py:callable, torchvision:NAME, timm:NAME or hf:FOLDER. Nothing is downloaded. A "
        "module or file is imported, which runs the code in it: name only what you trust.",
    ),
]
CheckpointFile = Annotated[
    Positional[Path | None],
    arg(metavar="[CHECKPOINT]", help="A safetensors file, or a .pt file that holds a state dict."),
]
Inputs = Annotated[
    UseAppendAction[tuple[str, ...]],
    arg(
        metavar="SHAPE",
        help="Shape of an argument of forward: 1,3,224,224, with a dtype 1,16:int64, or by name input_ids=1,16:int64. "
        "Repeat it for several. Guessed for torchvision, timm and hf.",
    ),
]
ModelArgs = Annotated[
    UseAppendAction[tuple[str, ...]],
    arg(
        metavar="KEY=VALUE", help="An argument to build the model with, such as num_classes=10. Repeat it for several."
    ),
]
Patterns = UseAppendAction[tuple[str, ...]]
Keep = Annotated[Patterns, arg(metavar="PATTERN", help="Parameters that must not move, such as 'head.*'.")]
DType = Annotated[
    Literal["float64", "float32", "bfloat16", "float16"] | None,
    arg(
        metavar="DTYPE",
        help="Build the model in float64, float32, bfloat16 or float16. A checkpoint keeps its own dtypes.",
    ),
]
Json = Annotated[bool, arg(help="Print JSON and nothing else.")]

# -- commands ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """Say which axes of which parameters can be rescaled without changing what the model computes, and why the others
    cannot."""

    model: Model
    checkpoint: CheckpointFile = None
    input: Inputs = ()
    model_args: ModelArgs = ()
    keep: Keep = ()
    dtype: DType = None
    json: Json = False

    def run(self) -> None:
        work = _Work.begin(self)
        explanation = work.symmetry.explain()
        if self.json:
            _print_json({"model": self.model, "num_scales": work.symmetry.num_scales, **explanation.to_dict()})
        else:
            print(explanation)


@dataclass(frozen=True)
class Balance:
    """Rescale a model to the least Lp norm among all networks that compute the same function, check its outputs, and
    write the checkpoint. Without --output nothing is written."""

    model: Model
    checkpoint: CheckpointFile = None
    output: Annotated[
        Path | None,
        arg(
            metavar="FILE",
            help="Where to write, in the checkpoint's own format. For hf:FOLDER the name of a new folder: config, "
            "tokenizer and all shards, one shard in memory at a time.",
        ),
    ] = None
    shard_size: Annotated[
        str | None, arg(metavar="SIZE", help="Of the files in a new folder, such as 5GB (those of the old one).")
    ] = None
    p: Annotated[float, arg(help="Which norm (2).")] = 2.0
    c: Annotated[float, arg(help="Asymmetry: more than 1 moves energy towards the output (1).")] = 1.0
    tol: Annotated[float, arg(help="Largest imbalance |log(incoming / outgoing mass)| accepted (1e-8).")] = 1e-8
    parameters: Annotated[
        Patterns, arg(metavar="PATTERN", help="Parameters that count in the norm (all that multiply).")
    ] = ()
    input: Inputs = ()
    model_args: ModelArgs = ()
    keep: Keep = ()
    dtype: DType = None
    json: Json = False
    force: Annotated[bool, arg(help="Overwrite the output file if it exists.")] = False

    def run(self) -> None:
        from .errors import UserError
        from .tools import checkpoints

        if (folder := self._folder()) is not None:
            self._balance_folder(folder)
            return
        if self.shard_size is not None:
            raise UserError("--shard-size is for folders: name the model as hf:FOLDER and a folder as --output")
        if self.output is not None:
            _check_output(self.output, self.force)
        work = _Work.begin(self, keep_fresh=self.output is not None)
        if not work.symmetry.num_scales:
            raise UserError(f"nothing to rescale: no scale of {self.model} is free. `equinorm trace` says why")
        if self.output is not None:
            if work.file is None and work.checkpoint is not None:
                raise UserError(
                    f"{self.model} keeps its weights in several files or under names of its own: give the name of a "
                    f"new folder, such as --output {self.output.stem}"
                )
            written = work.checkpoint or checkpoints.of_model(work.model, self.output)
            if written.safetensors != checkpoints.is_safetensors(self.output):
                raise UserError(
                    f"{self.output.name}: the output is written in the format of {work.file}, give it that suffix"
                )
        say = _nothing if self.json else print
        say(f"{self.model}: {work.origin}")
        say(work.symmetry.explain().summary)
        report, verified = work.balance(self)
        say(report)
        say(
            f"outputs: largest relative change {verified['relative_change']:.1e} on {verified['inputs']} random "
            f"inputs, computed in {verified['computed_in']} (accepted up to {verified['tolerance']:.0e})"
        )
        if verified["relative_change"] > verified["tolerance"]:
            what = "nothing was written" if self.output is not None else "do not use the balanced weights"
            raise UserError(
                f"the outputs changed by {verified['relative_change']:.1e}, more than the "
                f"{verified['tolerance']:.0e} that rounding explains, so {what}. Where outputs cancel or weights are "
                "in half precision, convert the checkpoint to a wider dtype first"
            )
        if self.output is not None:
            with _step(f"writing {self.output}"):
                _check_output(self.output, self.force)
                written = checkpoints.give_back(work.model, (w.name for w in work.symmetry.moving), written)
                written.write(self.output, check=work.check_written)
            say(f"written: {self.output} (read back into a fresh model: {work.change_written:.1e})")
            if others := [name for name in written.others if name not in ("epoch", "step", "args", "config")]:
                say(f"kept as they were: {', '.join(others)}")
                say(
                    "(an optimizer's state or an average of weights among them belongs to the weights before balancing)"
                )
        else:
            say("nothing written: give --output FILE for that")
        if self.json:
            output = None if self.output is None else str(self.output)
            origin = None if work.file is None else str(work.file)
            names = {"model": self.model, "checkpoint": origin, "output": output}
            _print_json({**names, **report.to_dict(), "verified": verified})

    def _folder(self) -> str | None:
        """The folder, where it is to be balanced as a whole."""
        from .tools import checkpoints, pretrained

        kind, _, folder = self.model.partition(":")
        if kind != "hf" or self.checkpoint is not None:
            return None
        if self.output is None:
            return folder if (Path(folder) / pretrained.INDEX).is_file() else None
        return None if self.output.suffix in checkpoints.SUFFIXES else folder

    def _balance_folder(self, folder: str) -> None:
        import resource
        from time import monotonic

        from .balance import BalanceReport, counting
        from .criteria import Norm
        from .errors import UserError, counted
        from .symmetry import TraceError, trace
        from .tools import pretrained, sources

        if self.output is not None:
            _check_folder(self.output)
        say = _nothing if self.json else print
        with _step(f"reading {folder}"):
            held = pretrained.Pretrained.read(Path(folder).expanduser())
            empty = sources.empty_transformer(folder, self.model_args, most=max(held.largest_shard, 1 << 28))
            bound = pretrained.Bound(held, empty.model)
        inputs = tuple(sources.parse_input(text) for text in self.input) or empty.inputs
        if not inputs:
            raise UserError(f"what does {self.model} take? Give the shape of its input, such as --input 1,3,224,224")

        def examples(model: nn.Module) -> list[Any]:
            return [sources.example_inputs(sources.fitting(inputs, model), model, seed) for seed in range(2)]

        begun = monotonic()
        with _step("tracing"):
            try:
                symmetry = trace(empty.model, sources.without_values(examples(empty.model)[0]), keep=self.keep)
                counts = counting(symmetry, self.parameters or None)
            except (TraceError, ValueError) as error:
                raise UserError(str(error)) from error
        traced = monotonic()
        program = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # no weight was read up to here
        if not symmetry.num_scales:
            raise UserError(f"nothing to rescale: no scale of {self.model} is free. `equinorm trace` says why")
        say(
            f"{self.model}: {len(held.tensors)} tensors, {held.dtypes}, {pretrained.in_bytes(held.nbytes)} in "
            f"{counted(len(held.metadata), 'file')}"
        )
        say(symmetry.explain(summary=True).summary)
        need = max(part.solver_bytes(self.p, counts) for part in pretrained.parts(symmetry))
        say(
            f"memory: two shards of {pretrained.in_bytes(held.largest_shard)}, {pretrained.in_bytes(need)} for the "
            f"solver, and the program itself"
        )
        with _step("balancing") as going_on:
            try:
                plan = pretrained.balanced(bound, symmetry, self.p, self.c, self.tol, self.parameters or None, going_on)
            except (ValueError, OverflowError) as error:
                raise UserError(str(error)) from error
        with _step(f"writing {self.output}" if self.output is not None else "checking") as going_on:
            written = pretrained.write(
                bound,
                plan,
                self.output,
                lambda old, new: pretrained.check_slices(old, new, empty.make, empty.choices, examples),
                self.shard_size,
                going_on,
            )
        report = BalanceReport(
            written.norm_before,
            written.norm_after,
            plan.imbalance,
            plan.iterations,
            monotonic() - traced,
            plan.converged,
            plan.num_scales,
            plan.held,
            plan.held_in,
            traced - begun,
            None if written.check.why_not else written.check.change,
            criterion=Norm(self.p, self.c),
            value_before=plan.value_before,
            value_after=plan.value_after,
        )
        say(report)
        say(written.check)
        if written.left_out:
            say(f"left out, since they hold weights from before: {', '.join(written.left_out)}")
        if bound.unused:
            say(
                f"kept as they were, since the model does not use them: {', '.join(bound.unused[:3])}"
                + (f" and {len(bound.unused) - 3} more" if len(bound.unused) > 3 else "")
            )
        say(
            "nothing written: give --output FOLDER for that"
            if self.output is None
            else f"written: {self.output} ({counted(written.shards, 'file')}, each read back)"
        )
        if self.json:
            _print_json(
                {
                    "model": self.model,
                    "checkpoint": folder,
                    "output": None if self.output is None else str(self.output),
                    **report.to_dict(),
                    "verified": asdict(written.check),
                    "passes": plan.passes,
                    "solver_bytes": need,
                    "largest_shard": held.largest_shard,
                    "program_bytes": program,
                }
            )


Options = Annotated[
    UseAppendAction[tuple[str, ...]],
    arg(metavar="KEY=VALUE", help="An option of the method, see `equinorm methods`. Repeat it for several."),
]
MethodName = Annotated[
    Positional[str], arg(metavar="METHOD", help="Such as equinorm or msr; `equinorm methods` lists them.")
]
Output = Annotated[
    Path | None, arg(metavar="FILE", help="Where to write the weights, as .safetensors or .pt. Without it nothing is.")
]
Force = Annotated[bool, arg(help="Overwrite the output file if it exists.")]


@dataclass(frozen=True)
class Convert:
    """Put a method on a model: say which modules change and why others stay, and write the weights to train from."""

    model: Model
    method: MethodName
    checkpoint: CheckpointFile = None
    output: Output = None
    option: Options = ()
    input: Inputs = ()
    model_args: ModelArgs = ()
    keep: Annotated[Patterns, arg(metavar="PATTERN", help="Modules that must stay as they are, such as 'head.*'.")] = ()
    json: Json = False
    force: Force = False

    def run(self) -> None:
        from .tools.converting import converted

        if self.output is not None:
            _check_output(self.output, self.force)
        with _step(f"converting {self.model}"):
            done = converted(
                self.model, self.method, self.checkpoint, self.input, self.model_args, self.option, self.keep
            )
        _finish(done, self.output, self.json, self.model)
        if not self.json:
            given = "".join(f", {text}" for text in self.option)
            print(f'in Python: model, report = equinorm.convert(model, "{self.method}", example_inputs{given})')


@dataclass(frozen=True)
class Fold:
    """Turn the weights of a converted, trained model into those of the plain model, which compute the same."""

    model: Model
    method: MethodName
    checkpoint: Annotated[
        Positional[Path], arg(metavar="CHECKPOINT", help="Of the converted model: .safetensors or .pt.")
    ]
    output: Output = None
    option: Options = ()
    input: Inputs = ()
    model_args: ModelArgs = ()
    keep: Annotated[Patterns, arg(metavar="PATTERN", help="Modules that were not converted.")] = ()
    json: Json = False
    force: Force = False

    def run(self) -> None:
        from .tools.converting import folded

        if self.output is not None:
            _check_output(self.output, self.force)
        with _step(f"folding {self.checkpoint}"):
            done = folded(self.model, self.method, self.checkpoint, self.input, self.model_args, self.option, self.keep)
        _finish(done, self.output, self.json, self.model)


@dataclass(frozen=True)
class Methods:
    """List the methods that `convert` knows; with a name, its options."""

    method: Annotated[Positional[str | None], arg(metavar="[METHOD]", help="Only this one, with its options.")] = None
    json: Json = False

    def run(self) -> None:
        from .registry import find_method, methods

        if self.method is not None:
            try:
                found = find_method(self.method)
            except ValueError as error:
                raise _user_error(str(error)) from error
        chosen = methods() if self.method is None else (found,)
        if self.json:
            fields = ("name", "title", "kind", "source", "options")
            _print_json({"methods": [{name: getattr(one, name) for name in fields} for one in chosen]})
            return
        _show_methods(chosen)


@dataclass(frozen=True)
class Diagnose:
    """Write a page about a model: what can be rescaled, how balanced it is, how far signals get, and what to try."""

    model: Model
    checkpoint: CheckpointFile = None
    output: Annotated[Path, arg(metavar="FILE", help="The page to write (./diagnosis.html).")] = Path("diagnosis.html")
    data: Annotated[
        Path | None,
        arg(
            metavar="FILE",
            help="Real inputs: a .pt file with a tensor, a tuple of arguments or a dict of arguments by name.",
        ),
    ] = None
    samples: Annotated[int, arg(help="How many random samples to draw without --data (16).")] = 16
    input: Inputs = ()
    model_args: ModelArgs = ()
    keep: Keep = ()
    dtype: DType = None
    json: Json = False
    force: Annotated[bool, arg(help="Overwrite the page if it exists.")] = False

    def run(self) -> None:
        from .tools import diagnose

        if self.samples < 1:
            raise _user_error(f"--samples must be at least 1, got {self.samples}")
        _check_place(self.output, self.force)
        data = None if self.data is None else diagnose.read_data(self.data)
        work = _Work.begin(self)
        batch = diagnose.random_batch(work.inputs, work.model, self.samples) if data is None else None
        with _step("measuring"):
            found = diagnose.diagnose(
                work.model,
                work.examples[0] if batch is None else batch,
                self.output,
                name=self.model,
                origin=work.origin,
                data=data,
                symmetry=work.symmetry,
            )
        advice = diagnose.what_to_try(found)
        if self.json:
            _print_json({"model": self.model, "page": str(self.output), "advice": [asdict(item) for item in advice]})
            return
        for item in advice:
            print(f"- {item.seen}\n  {item.advice}")
        print(f"written: {self.output}")


@dataclass(frozen=True)
class Compare:
    """Say how far two models are apart, whatever rescaling they are given in: 0 if one is a rescaling of the other."""

    a: Annotated[
        Positional[str], arg(metavar="A", help="A model (see `equinorm trace --help`), or with --model a checkpoint.")
    ]
    b: Annotated[Positional[str], arg(metavar="B", help="The other one, of the same architecture.")]
    model: Annotated[
        str | None, arg(metavar="MODEL", help="The model that both are checkpoints of, such as torchvision:resnet18.")
    ] = None
    input: Inputs = ()
    model_args: ModelArgs = ()
    json: Json = False

    def run(self) -> None:
        from .comparison import compare
        from .errors import UserError

        one, two = (self._begun(name) for name in (self.a, self.b))
        with _step("comparing"):
            try:
                found = compare(one.model, two.model, None, symmetry=one.symmetry)
            except (ValueError, OverflowError) as error:
                raise UserError(str(error)) from error
        if self.json:
            parts = {name: part for name, part in found.parts if part > 0}
            names = {"a": self.a, "b": self.b, "model": self.model, "same": found.same}
            _print_json({**names, **asdict(found), "parts": parts})
        else:
            print(found)

    def _begun(self, name: str) -> _Work:
        from .errors import UserError

        if self.model is not None:
            return _Work.begin(Trace(self.model, Path(name), self.input, self.model_args))
        if Path(name).is_file():
            raise UserError(f"which model is {name} a checkpoint of? Name it, such as --model torchvision:resnet18")
        return _Work.begin(Trace(name, None, self.input, self.model_args))


@dataclass(frozen=True)
class Fit16:
    """Bring every weight and activation into float16's range by exact rescaling, with the ε of norms, or say what
    cannot be. Without --output nothing is written. The model is run in float64, in memory."""

    model: Model
    checkpoint: CheckpointFile = None
    inputs: Annotated[
        Path | None,
        arg(
            metavar="FILE",
            help="What activations are measured on: a .pt file with what the model is called with (a tensor, a tuple "
            "or a dict), or a list of such batches.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        arg(
            metavar="FILE",
            help="Where to write: a new folder for hf:FOLDER, whose config gets the new ε; else a file like the "
            "checkpoint, and beside it FILE.epsilons.json.",
        ),
    ] = None
    dtype: Annotated[Literal["float16", "bfloat16"], arg(help="Whose range (float16).")] = "float16"
    headroom: Annotated[float, arg(help="How many times larger than measured an activation may become (4).")] = 4.0
    model_args: ModelArgs = ()
    keep: Keep = ()
    json: Json = False
    force: Force = False

    def run(self) -> None:
        import torch

        from .errors import UserError
        from .tools import fit16

        if self.inputs is None:
            raise UserError("which inputs? Activations are measured on them: save some with torch.save, --inputs FILE")
        inputs = fit16.read_inputs(self.inputs)
        with _step(f"reading {self.model}"):
            opened = fit16.opened(self.model, self.checkpoint, self.model_args)
        folder = opened.folder
        if self.output is not None and opened.checkpoint is None:
            raise UserError("there is no checkpoint to write anew: its weights are random")
        if self.output is not None:
            _check_folder(self.output) if folder is not None else _check_output(self.output, self.force)
        dtype = getattr(torch, self.dtype)
        with _step("running the model"):
            exact = fit16.exact_outputs(opened.model, inputs)
            before = fit16.state_in(opened.model, inputs, dtype, exact)
        with _step("looking for scales"):
            try:
                fitted = fit16.fit(opened.model, inputs, folder, self.model_args, dtype, self.headroom, self.keep)
            except (ValueError, OverflowError) as error:
                raise UserError(str(error)) from error
        after = fit16.state_in(fitted.moved(), inputs, dtype, exact)
        say = _nothing if self.json else print
        for line in (f"before: {before}", f"after:  {after}", fitted):
            say(line)
        change = None
        if self.output is not None:
            with _step(f"writing {self.output}"):
                if folder is not None:
                    change = fit16.write_folder(folder, self.model_args, fitted, inputs, self.output)
                else:
                    assert opened.checkpoint is not None
                    change = fit16.write_file(fitted, opened.checkpoint, inputs, self.output)
            say(f"written: {self.output} (outputs in float64 moved by {change:.1e})")
            if folder is None and fitted.numbers:
                say(f"ε of {len(fitted.numbers)} norms: {fit16.epsilons_beside(self.output)}; give them to your model")
        else:
            say("nothing written: give --output for that")
        if self.json:
            _print_json(
                {
                    "model": self.model,
                    "before": asdict(before),
                    "after": asdict(after),
                    "excess": fitted.excess,
                    "config": fitted.config,
                    "notes": fitted.notes,
                    "output_change": change,
                }
            )


@dataclass(frozen=True)
class Mappings:
    """List where a diagonal can move between layers: the mappings of SmoothQuant and AWQ, proved in float64. For
    hf:FOLDER the config is enough, no weight is read."""

    model: Model
    format: Annotated[
        Literal["text", "llm-compressor"], arg(help="For people, or as a recipe that llm-compressor reads.")
    ] = "text"
    input: Inputs = ()
    model_args: ModelArgs = ()
    json: Json = False

    def run(self) -> None:
        from .tools import mappings

        found, change = mappings.of_model(self.model, self.model_args, self.input, _step)
        if self.json:
            rows = [{"smooth": row.patterns[0], "balance": row.patterns[1], **asdict(row)} for row in found]
            _print_json({"model": self.model, "mappings": rows})
        elif self.format == "text":
            print(mappings.table(found))
            print(change)
        else:
            print(mappings.recipe(found))
            print(change, file=sys.stderr)


@dataclass(frozen=True)
class Demo:
    """ENorm in deep nets, and every family on one net, on scikit-learn's digits: tables and a picture, in minutes on a
    CPU."""

    output: Annotated[
        Path, arg(metavar="DIR", help="Folder for the picture, the table and the runs (./equinorm-demo).")
    ] = Path("equinorm-demo")
    seed: Annotated[int, arg(help="The first of the seeds (0).")] = 0
    quick: Annotated[bool, arg(help="One seed and two depths.")] = False
    tune: Annotated[
        bool, arg(help="Choose the learning rates anew, which takes several minutes, and write the log.")
    ] = False

    def run(self) -> None:
        try:
            from .lab.experiments import demo
        except ImportError as error:
            from .errors import UserError

            raise UserError(f"the demo needs {error.name}: pip install 'equinorm[lab]'") from error
        if self.tune:
            demo.tune(self.output, sys.argv)
        else:
            demo.run(self.output, seed=self.seed, quick=self.quick, command=sys.argv)


# -- the laboratory ----------------------------------------------------------------------------------------------------

DataDir = Annotated[
    Path | None, arg(metavar="DIR", help="Where data sets lie (the folder EQUINORM_DATA names, else ./data).")
]
Results = Annotated[
    Path | None, arg(metavar="DIR", help="Where results are kept (./results; toy runs: ./results-toy).")
]
_TOY = "A toy: tiny sizes on embedded digits. It shows that everything runs; its numbers mean nothing."
Toy = Annotated[bool, arg(help="Everything in seconds, on embedded digits: to see that it runs, not to measure.")]
Device = Annotated[str | None, arg(metavar="DEVICE", help="cpu, cuda, cuda:1 (a GPU if there is one).")]


@dataclass(frozen=True)
class Train:
    """Train one run of a recipe: one cell of a table or one point of a figure, with one seed."""

    recipe: Annotated[Positional[str], arg(metavar="ARTIFACT", help="Such as repro2019/figure2.")]
    row: Annotated[str | None, arg(help="The method, as the table or figure calls it (the first).")] = None
    column: Annotated[str | None, arg(help="Where: the depth, the batch size (the first).")] = None
    seed: Annotated[int, arg(help="Which of the seeds (0).")] = 0
    data_dir: DataDir = None
    results: Results = None
    device: Device = None
    toy: Toy = False

    def run(self) -> None:
        from .lab.experiments.reproduce import chosen, single
        from .lab.training.launchers import Options, launch
        from .lab.training.store import Store

        (artifact, *_) = chosen([self.recipe], self.toy)
        run = single(artifact, self.row, self.column, self.seed)
        store = Store(_results(self.results, self.toy))
        outcome = launch([run], store, options=Options(self.data_dir, self.device))
        record = store.get(run)
        if record is None:
            raise KeyboardInterrupt if outcome.interrupted else _user_error("another process is training this run")
        if int(os.environ.get("RANK", "0")):  # one of several processes says it
            return
        final = record.final
        numbers = f"test {final['test_accuracy']:.2f} %" if record.status == "finished" else final["reason"]
        where = "from the store" if outcome.known else f"{final['seconds']:.1f} s"
        print(f"{run.label or run.key}, seed {run.seed}: {record.status}, {numbers}, {where}. {store.path(run)}")
        if self.toy:
            print(_TOY)


@dataclass(frozen=True)
class Reproduce:
    """Train all runs behind a table or figure that are not in the store yet. Stop it at any time: it goes on where it
    was."""

    artifacts: Annotated[
        Positional[tuple[str, ...]],
        arg(metavar="ARTIFACT", help="Such as repro2019/figure2, or a paper (repro2019), or all; none: list them."),
    ] = ()
    launcher: Annotated[Literal["local", "ray", "slurm"], arg(help="In this process, on Ray, or as Slurm jobs.")] = (
        "local"
    )
    data_dir: DataDir = None
    results: Results = None
    device: Device = None
    toy: Toy = False
    minutes: Annotated[float, arg(help="Save what is in progress and stop after so many minutes.")] = math.inf
    side_by_side: Annotated[
        int | None, arg(metavar="N", help="Runs in progress at once on one device (8 on a GPU, 1 on a CPU).")
    ] = None
    row: Annotated[Patterns, arg(metavar="ROW", help="Only this method. Repeat it for several.")] = ()
    column: Annotated[Patterns, arg(metavar="COLUMN", help="Only this depth, batch size ... Repeat it.")] = ()
    address: Annotated[
        str | None, arg(metavar="ADDRESS", help="Of a Ray cluster (RAY_ADDRESS, else one made on this machine).")
    ] = None
    partition: Annotated[str | None, arg(metavar="NAME", help="Of Slurm.")] = None

    def run(self) -> None:
        from .lab.experiments.reproduce import chosen, reproduce
        from .lab.training.launchers import Options
        from .lab.training.store import Store

        if not self.artifacts:
            _list_artifacts(_results(self.results, self.toy), self.toy)
            return
        picked = chosen(self.artifacts, self.toy, self.row, self.column)
        store = Store(_results(self.results, self.toy))
        options = Options(
            self.data_dir, self.device, self.side_by_side, self.minutes, address=self.address, partition=self.partition
        )
        done = reproduce(picked, store, toy=self.toy, launcher=self.launcher, options=options)
        print(done.sentence())
        if done.outcome.interrupted:
            raise KeyboardInterrupt
        if self.toy:
            print(_TOY)
        flags = " --toy" * self.toy + (f" --results {store.folder}" if self.results else "")
        print(f"`equinorm report{flags}` writes tables and figures from {store.folder}.")


@dataclass(frozen=True)
class Campaign:
    """Train what is wanted for the results of this repository, in order, and only what can be finished in the time
    there is."""

    list: Annotated[bool, arg(help="Print what is done and what is left, and train nothing.")] = False
    choose: Annotated[bool, arg(help="Write the settings that the tuning runs decided into the recipe.")] = False
    merge: Annotated[
        tuple[Path, ...], arg(metavar="FILE", help="Take over runs that a sitting brought back: its runs.jsonl.")
    ] = ()
    item: Annotated[
        Patterns, arg(metavar="ITEM", help="Only this item, artifact or paper. Repeat it for several.")
    ] = ()
    minutes: Annotated[float, arg(help="Save what is in progress and stop after so many minutes.")] = math.inf
    sitting: Annotated[
        float | None,
        arg(metavar="MINUTES", help="Until this disk is lost: only what fits is begun (the same as --minutes)."),
    ] = None
    data_dir: DataDir = None
    results: Results = None
    device: Device = None
    side_by_side: Annotated[
        int | None, arg(metavar="N", help="Runs in progress at once on one device (8 on a GPU, 1 on a CPU).")
    ] = None
    toy: Toy = False

    def run(self) -> None:
        from .lab.experiments import campaign
        from .lab.training.launchers import Options, launch
        from .lab.training.store import Store

        store, items = Store(_results(self.results, self.toy)), campaign.named(self.item)
        for file in self.merge:
            merged = store.merge(file)
            print(f"{file}: {len(merged.added)} new, {len(merged.present)} known, {len(merged.damaged)} not whole")
        if self.choose:
            changed = campaign.write_chosen(store)
            print(f"{campaign.CHOSEN}: {'written' if changed else 'as it was'}")
        if self.list:
            print(campaign.table(campaign.standing(store, items, toy=self.toy)))
        if self.choose or self.list or self.merge:
            return
        done = campaign.work(
            store,
            items,
            minutes=self.minutes,
            sitting=self.sitting,
            toy=self.toy,
            data_dir=self.data_dir,
            device=self.device,
            side_by_side=self.side_by_side,
            train=lambda runs, into, **options: launch(runs, into, options=Options(**options)),
        )
        print(done.sentence())
        if done.interrupted:
            raise KeyboardInterrupt


@dataclass(frozen=True)
class Record:
    """Train CIFAR-10 to 94 % without batch statistics, beside a BatchNorm twin, in turn; print accuracy and seconds."""

    data_dir: Annotated[Path, arg(metavar="DIR", help="Holds cifar-10-batches-bin.")] = Path("data")
    output: Annotated[
        Path, arg(metavar="DIR", help="Where runs are logged; those that are there are not repeated (./out/record).")
    ] = Path("out/record")
    n: Annotated[int, arg(metavar="N", help="Runs of each net.")] = 20
    device: Device = None
    toy: Annotated[bool, arg(help="A tiny net on noise, on any machine: to see that it runs.")] = False

    def run(self) -> None:
        from .lab.record.run import record

        if self.n < 1:
            raise _user_error(f"--n is how often each net is trained, at least 1, got {self.n}")
        try:
            print(record(self.data_dir, self.output, self.n, self.toy, self.device))
        except (RuntimeError, FileNotFoundError) as error:
            raise _user_error(str(error)) from error


@dataclass(frozen=True)
class Report:
    """Put every number next to the paper's: README.md, index.html and figures, from the runs in the results folder."""

    artifact: Annotated[
        Positional[str | None],
        arg(
            metavar="[ARTIFACT]", help="Print what there is on this table, figure or paper, and draw its figures only."
        ),
    ] = None
    results: Results = None
    toy: Toy = False
    tensorboard: Annotated[bool, arg(help="Write all curves as TensorBoard event files too.")] = False

    def run(self) -> None:
        from .lab.experiments.reproduce import chosen
        from .lab.training.store import Store

        try:
            from .lab import report
        except ImportError as error:
            raise _user_error(f"the report needs {error.name}: pip install 'equinorm[lab]'") from error
        store = Store(_results(self.results, self.toy))
        if not store.folder.is_dir():
            raise _user_error(f"there is no folder {store.folder}: name the one with your runs with --results")
        if self.artifact is not None:
            for artifact in chosen([self.artifact]):  # `section` takes the toy version itself
                _show([report.section(store, artifact, store.folder, self.toy)])
            return
        with _step("writing the report"):
            written = report.write(store, store.folder, toy=self.toy, tensorboard=self.tensorboard)
        for why in written.damaged.values():
            print(f"not used: {why}", file=sys.stderr)
        run = sum(result.was_run for result in written.results)
        print(
            f"{run} of {len(written.results)} tables and figures have results. "
            f"Written: {written.readme}, a page for each paper, {written.page}"
        )


@dataclass(frozen=True)
class Bench:
    """Measure speed, side by side: training steps with every normalization, how their cost grows, tracing and
    balancing, and the laboratory itself."""

    parts: Annotated[
        Positional[tuple[str, ...]],
        arg(
            metavar="PART",
            help="steps, scaling, balance, lab (these four); kernels, instruments, checkpoint, sharded, quantization.",
        ),
    ] = ()
    only: Annotated[
        UseAppendAction[tuple[str, ...]],
        arg(metavar="NAME", help="Only this network or run, such as resnet18. Repeat it for several."),
    ] = ()
    output: Annotated[
        Path, arg(metavar="DIR", help="Where tables, numbers and pictures are written (./out/bench).")
    ] = Path("out/bench")
    device: Device = None
    variant: Annotated[Patterns, arg(metavar="NAME", help="Only this normalization, such as BN. Repeat it.")] = ()
    mode: Annotated[
        Literal["both", "eager", "compiled"], arg(help="Steps as they are, by torch.compile (takes minutes), or both.")
    ] = "both"
    quick: Annotated[bool, arg(help="Tiny sizes: to see that it runs, not to measure.")] = False
    repeats: Annotated[int, arg(metavar="N", help="Measurements of each number (7).")] = 7
    minutes: Annotated[float, arg(help="Begin nothing new after so many minutes.")] = math.inf
    data_dir: Annotated[
        Path | None, arg(metavar="DIR", help="Imagenette, as val224.tar and train160.tar, for quantization.")
    ] = None

    def run(self) -> None:
        from .lab.bench.run import run

        written = run(
            self.parts,
            self.output,
            device=self.device,
            only=self.only,
            variants=self.variant,
            mode=self.mode,
            quick=self.quick,
            repeats=self.repeats,
            minutes=self.minutes,
            data_dir=self.data_dir,
        )
        print("Written: " + ", ".join(str(path) for path in dict.fromkeys(written)) if written else "Nothing written.")


def _show(blocks: Sequence[Any]) -> None:
    from rich.console import Console

    from .lab.report import terminal

    terminal.show(blocks, Console())


def _list_artifacts(results: Path, toy: bool) -> None:
    from rich.console import Console

    from .lab.experiments.artifacts import all_artifacts
    from .lab.report.standing import table
    from .lab.training.store import Store

    Console().print(table(Store(results), all_artifacts().values(), toy))
    print(f"\ndone: runs in {results} of all runs. time: of the device, for what is done.")
    print("`equinorm reproduce PAPER/NAME` trains what is missing, with --toy in seconds.")


def _results(folder: Path | None, toy: bool) -> Path:
    if folder is not None and folder.exists() and not folder.is_dir():
        raise _user_error(f"--results {folder} is a file: give the name of a folder")
    return folder or Path("results-toy" if toy else "results")


def _user_error(text: str) -> Exception:
    from .errors import UserError

    return UserError(text)


Command = (
    Annotated[Trace, tyro.conf.subcommand("trace")]
    | Annotated[Balance, tyro.conf.subcommand("balance")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
    | Annotated[Fold, tyro.conf.subcommand("fold")]
    | Annotated[Methods, tyro.conf.subcommand("methods")]
    | Annotated[Diagnose, tyro.conf.subcommand("diagnose")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Fit16, tyro.conf.subcommand("fit16")]
    | Annotated[Mappings, tyro.conf.subcommand("mappings")]
    | Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
    | Annotated[Campaign, tyro.conf.subcommand("campaign")]
    | Annotated[Record, tyro.conf.subcommand("record")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
)


def _finish(done: Outcome, output: Path | None, json: bool, model: str) -> None:
    """Say what was done, and write the weights."""
    from .tools import checkpoints

    if output is not None:
        with _step(f"writing {output}"):
            checkpoints.of_state(done.state, output).write(output)
    if json:
        named = {"model": model, "output": None if output is None else str(output)}
        _print_json({**named, **done.report.to_dict(), "outputs_moved": done.change})
        return
    print(done.report)
    moved = f"outputs moved by {done.change:.1e} on random inputs"
    print(moved if done.change < 1e-3 else f"{moved}: this net is to be trained")
    print("nothing written: give --output FILE for that" if output is None else f"written: {output}")


def _show_methods(chosen: Sequence[Method]) -> None:
    from rich.console import Console
    from rich.table import Table

    if len(chosen) == 1:
        (one,) = chosen
        print(f"{one.name}: {one.title} ({one.source})")
        for name, value in one.options.items():
            print(f"  {name} = {value!r}")
        return
    table = Table("method", "what it is", "source", box=None, header_style="bold", pad_edge=False)
    for one in chosen:
        table.add_row(one.name, one.title, one.source)
    Console().print(table)


# -- what trace and balance have in common -----------------------------------------------------------------------------


@dataclass(eq=False)
class _Work:
    """A model, its symmetry, and the checkpoint whose values it has."""

    model: nn.Module
    symmetry: Symmetry
    checkpoint: Checkpoint | None
    file: Path | None
    examples: list[Any]  # random inputs to compare outputs on
    inputs: tuple[Any, ...]  # what `forward` takes: `sources.Input`
    fresh: nn.Module | None = None  # the model as it was built, to load the written file into
    outputs: list[Tensor] = field(default_factory=list)  # before balancing
    change_written: float = math.inf  # of the outputs, with the values of the written file

    @classmethod
    def begin(cls, options: Trace | Balance | Diagnose, keep_fresh: bool = False) -> _Work:
        import torch

        from .errors import UserError
        from .symmetry import TraceError, trace
        from .tools import checkpoints, pretrained, sources

        inputs = tuple(sources.parse_input(text) for text in options.input)
        with _step(f"building {options.model}"):
            source = sources.load(options.model, options.model_args)
            model = source.model if options.dtype is None else source.model.to(getattr(torch, options.dtype))
        fresh = sources.copied(model, options.model, options.model_args) if keep_fresh else None
        inputs = inputs or source.inputs
        if not inputs:
            raise UserError(f"what does {options.model} take? Give the shape of its input, such as --input 1,3,224,224")
        file = options.checkpoint or source.checkpoint
        checkpoint = None
        if file is None and source.folder is not None:
            with _step(f"reading {source.folder.path}"):
                checkpoint = pretrained.Bound(source.folder, model).checkpoint()
                checkpoints.fit(checkpoint, model)
        if file is not None:
            with _step(f"reading {file}"):
                checkpoint = checkpoints.read(file)
                checkpoints.fit(checkpoint, model)
        examples = [sources.example_inputs(inputs, model, seed) for seed in range(2)]
        with _step("tracing"):
            try:
                symmetry = trace(model, examples[0], keep=options.keep)
            except (TraceError, ValueError) as error:
                raise UserError(
                    f"{error}{'' if options.input else ' (the inputs were guessed: see --input)'}"
                ) from error
        if checkpoint is not None:  # after tracing, which needs weights of one dtype
            checkpoints.adopt(checkpoint, model)
        return cls(model, symmetry, checkpoint, file, examples, inputs, fresh)

    @property
    def origin(self) -> str:
        if self.checkpoint is None:
            return "random weights (no checkpoint given)"
        where = self.file if self.file is not None else "its own weights"
        return f"{where}, {len(self.checkpoint.tensors)} tensors, {self.checkpoint.dtypes}"

    def balance(self, options: Balance) -> tuple[Any, dict[str, Any]]:
        """Balance in place; the report, and how much the outputs changed."""
        from .balance import balance_
        from .errors import UserError
        from .tools import verify

        with _step("computing outputs"):
            self.outputs, _ = verify.outputs(self.model, self.examples)
        with _step("balancing"):
            try:
                chosen = {"p": options.p, "c": options.c, "tol": options.tol, "parameters": options.parameters or None}
                report = balance_(self.model, symmetry=self.symmetry, **chosen)  # type: ignore[arg-type]
            except (ValueError, OverflowError) as error:
                raise UserError(str(error)) from error
        with _step("computing outputs again"):
            after, computed_in = verify.outputs(self.model, self.examples)
        return report, {
            "relative_change": verify.relative_change(self.outputs, after),
            "tolerance": verify.tolerance(self.model),
            "inputs": len(self.examples),
            "computed_in": str(computed_in).removeprefix("torch."),
        }

    def check_written(self, written: Checkpoint) -> None:
        """A fresh model with the values of the file that was written computes what the model did before."""
        import torch

        from .errors import UserError
        from .tools import checkpoints, verify

        assert self.fresh is not None
        with torch.no_grad():
            for parameter in self.fresh.parameters():
                parameter.fill_(math.nan)  # what the file does not set will show
        checkpoints.fit(written, self.fresh)
        checkpoints.adopt(written, self.fresh)
        after, _ = verify.outputs(self.fresh, self.examples)
        self.change_written, accepted = verify.relative_change(self.outputs, after), verify.tolerance(self.fresh)
        if self.change_written > accepted:
            raise UserError(
                f"with the written file the outputs change by {self.change_written:.1e}, more than the {accepted:.0e} "
                "that rounding explains, so it was removed. Please report this"
            )


def _check_output(output: Path, force: bool) -> None:
    """Refuse before any work is done what could not be written at the end."""
    from .tools import checkpoints

    checkpoints.is_safetensors(output)
    _check_place(output, force)


def _check_place(output: Path, force: bool) -> None:
    """Refuse what is no place for a file: links are followed, devices are left alone, permissions are respected."""
    from .errors import UserError

    place = _resolved(output)
    if place.is_dir():
        raise UserError(f"{output} is a folder: give the name of a file")
    if place.exists() and not place.is_file():
        raise UserError(f"{output} is a device or a pipe, not a file: give another name")
    _check_parent(output, place)
    if place.exists() and not force:
        raise UserError(f"{output} exists: give another name, or --force to overwrite it")
    if place.exists() and not place.stat().st_mode & 0o222:
        raise UserError(f"{output} is read-only: give another name, or allow writing with chmod u+w")


def _check_folder(output: Path) -> None:
    """Refuse what is no place for a new folder."""
    from .errors import UserError

    place = _resolved(output)
    if place.exists() and not place.is_dir():
        raise UserError(f"{output} is a file: give the name of a folder that does not exist yet")
    if place.is_dir() and any(place.iterdir()):
        raise UserError(f"{output} is a folder with something in it: give the name of one that does not exist yet")
    _check_parent(output, place)


def _resolved(output: Path) -> Path:
    from .errors import UserError

    try:
        place = output.resolve()
        place.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # a link that leads to itself; a name too long
        raise UserError(f"{str(output)!r} cannot be written: {error}") from error
    return place


def _check_parent(output: Path, place: Path) -> None:
    from .errors import UserError

    folder = place.parent
    if not folder.is_dir():
        where = f"{output} is a link to {place}, and there" if output.is_symlink() else "there"
        raise UserError(f"{where} is no folder {folder if output.is_symlink() else output.parent}: make it first")
    virtual = [Path("/dev"), Path("/proc"), Path("/sys")]
    if any(folder.is_relative_to(root) for root in virtual) and not folder.is_relative_to("/dev/shm"):
        raise UserError(f"{output} lies in {folder}, which holds devices and no files: give another place")
    if not os.access(folder, os.W_OK) or not folder.stat().st_mode & 0o222:
        raise UserError(f"no permission to write into {folder}")


# -- talking to the user -----------------------------------------------------------------------------------------------


@contextmanager
def _step(what: str) -> Iterator[Callable[[str], None]]:
    """A line that says what is going on, while it is going on, on a terminal. It gives a function for more words."""
    if not sys.stderr.isatty():
        yield _nothing
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(file=sys.stderr).status(f"{escape(what)} ...") as status:
        yield lambda more: status.update(f"{escape(what)}: {escape(more)} ...")


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(line if line[-1] in ".,:;!?" or line is lines[-1] else line + "." for line in lines)


def _nothing(*_: Any) -> None:
    pass


def _print_json(content: dict[str, Any]) -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None  # JSON has no infinity
        return value if value is None or isinstance(value, str | int | float) else str(value)  # a criterion, say

    print(json.dumps(plain(content), indent=2, ensure_ascii=False, allow_nan=False))


def _stop(*_: Any) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)  # an exception, so that temporary files are removed on the way out


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 1 for an error that is explained, 130 for Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if given == ["--version"]:
        from importlib.metadata import version

        print(version("equinorm"))
        return 0
    command = tyro.cli(
        Command,
        prog="equinorm",
        description="Networks kept in balance through their weights.",
        args=given,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes),
    )
    from .errors import UserError

    previous = signal.signal(signal.SIGTERM, _stop)
    try:
        command.run()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except UserError as error:
        print(f"equinorm: {_one_line(str(error))}", file=sys.stderr)
        return 1
    except Exception as error:
        if os.environ.get("EQUINORM_TRACEBACK"):
            raise
        said = _one_line(str(error)) or "no reason given"
        print(
            f"equinorm: unexpected {type(error).__name__}: {said} (EQUINORM_TRACEBACK=1 shows where; please report it)",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("equinorm: interrupted", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


if __name__ == "__main__":
    sys.exit(main())
