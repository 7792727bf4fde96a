"""The command `equinorm`. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

if TYPE_CHECKING:
    from torch import nn

    from .lab.checkpoints import Checkpoint
    from .symmetry import Symmetry

try:
    import tyro
    from tyro.conf import Positional, UseAppendAction
except ImportError:
    sys.exit("equinorm: the command line needs more than the library: pip install 'equinorm[lab]'")

# -- options that commands share ---------------------------------------------------------------------------------------

arg: Callable[..., Any] = partial(tyro.conf.arg, help_behavior_hint="")  # "(default: None)" says nothing to a reader

Model = Annotated[
    Positional[str],
    arg(
        metavar="MODEL",
        help="module:callable, file.py:callable, torchvision:NAME, timm:NAME or hf:FOLDER (nothing is downloaded).",
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
    output: Annotated[Path | None, arg(metavar="FILE", help="Where to write, in the checkpoint's own format.")] = None
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
        from .lab import UserError, checkpoints

        if self.output is not None:
            _check_output(self.output, self.force)
        work = _Work.begin(self)
        if not work.symmetry.num_scales:
            raise UserError(f"nothing to rescale: no scale of {self.model} is free. `equinorm trace` says why")
        if self.output is not None:
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
                checkpoints.give_back(work.model, (w.name for w in work.symmetry.moving), written)
                written.write(self.output)
            say(f"written: {self.output}")
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
            _print_json({**names, **asdict(report), "verified": verified})


@dataclass(frozen=True)
class Demo:
    """Train deep nets on scikit-learn's digits with and without ENorm: a table, a picture, a minute on two cores."""

    out: Annotated[
        Path, arg(metavar="DIR", help="Folder for the picture, the table and the runs (./equinorm-demo).")
    ] = Path("equinorm-demo")
    seed: Annotated[int, arg(help="The first of the seeds (0).")] = 0
    quick: Annotated[bool, arg(help="One seed, two depths and fewer steps.")] = False
    tune: Annotated[
        bool, arg(help="Choose the learning rates anew, which takes several minutes, and write the log.")
    ] = False

    def run(self) -> None:
        try:
            from .lab import demo
        except ImportError as error:
            from .lab import UserError

            raise UserError(f"the demo needs {error.name}: pip install 'equinorm[lab]'") from error
        if self.tune:
            demo.tune(self.out, sys.argv)
        else:
            demo.run(self.out, seed=self.seed, quick=self.quick, command=sys.argv)


Command = (
    Annotated[Trace, tyro.conf.subcommand("trace")]
    | Annotated[Balance, tyro.conf.subcommand("balance")]
    | Annotated[Demo, tyro.conf.subcommand("demo")]
)


# -- what trace and balance have in common -----------------------------------------------------------------------------


@dataclass(eq=False)
class _Work:
    """A model, its symmetry, and the checkpoint whose values it has."""

    model: nn.Module
    symmetry: Symmetry
    checkpoint: Checkpoint | None
    file: Path | None
    examples: list[Any]  # random inputs to compare outputs on

    @classmethod
    def begin(cls, options: Trace | Balance) -> _Work:
        import torch

        from .lab import UserError, checkpoints, sources
        from .symmetry import TraceError, trace

        inputs = tuple(sources.parse_input(text) for text in options.input)
        with _step(f"building {options.model}"):
            source = sources.load(options.model, options.model_args)
            model = source.model if options.dtype is None else source.model.to(getattr(torch, options.dtype))
        inputs = inputs or source.inputs
        if not inputs:
            raise UserError(f"what does {options.model} take? Give the shape of its input, such as --input 1,3,224,224")
        file = options.checkpoint or source.checkpoint
        checkpoint = None
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
        return cls(model, symmetry, checkpoint, file, examples)

    @property
    def origin(self) -> str:
        if self.checkpoint is None:
            return "random weights (no checkpoint given)"
        return f"{self.file}, {len(self.checkpoint.tensors)} tensors, {self.checkpoint.dtypes}"

    def balance(self, options: Balance) -> tuple[Any, dict[str, Any]]:
        """Balance in place; the report, and how much the outputs changed."""
        from .enorm import balance_
        from .lab import UserError, verify

        with _step("computing outputs"):
            before, _ = verify.outputs(self.model, self.examples)
        with _step("balancing"):
            try:
                chosen = {"p": options.p, "c": options.c, "tol": options.tol, "parameters": options.parameters or None}
                report = balance_(self.model, symmetry=self.symmetry, **chosen)  # type: ignore[arg-type]
            except (ValueError, OverflowError) as error:
                raise UserError(str(error)) from error
        with _step("computing outputs again"):
            after, computed_in = verify.outputs(self.model, self.examples)
        return report, {
            "relative_change": verify.relative_change(before, after),
            "tolerance": verify.tolerance(self.model),
            "inputs": len(self.examples),
            "computed_in": str(computed_in).removeprefix("torch."),
        }


def _check_output(output: Path, force: bool) -> None:
    """Refuse before any work is done what could not be written at the end."""
    from .lab import UserError, checkpoints

    checkpoints.is_safetensors(output)
    if output.is_dir():
        raise UserError(f"{output} is a folder: give the name of a file")
    if not output.parent.is_dir():
        raise UserError(f"there is no folder {output.parent}: make it first")
    if output.exists() and not force:
        raise UserError(f"{output} exists: give another name, or --force to overwrite it")
    if not os.access(output.parent, os.W_OK):
        raise UserError(f"no permission to write into {output.parent}")


# -- talking to the user -----------------------------------------------------------------------------------------------


@contextmanager
def _step(what: str) -> Iterator[None]:
    """A line that says what is going on, while it is going on, on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(file=sys.stderr).status(f"{escape(what)} ..."):
        yield


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
        return None if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no infinity

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
    from .lab import UserError

    previous = signal.signal(signal.SIGTERM, _stop)
    try:
        command.run()
        sys.stdout.flush()
    except UserError as error:
        print(f"equinorm: {_one_line(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("equinorm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


if __name__ == "__main__":
    sys.exit(main())
