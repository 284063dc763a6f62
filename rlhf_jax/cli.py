"""The command line: `rlhf-jax COMMAND CONFIG.yaml [key=value ...]`.

Exit codes: 0 done; 2 the input is wrong, one line on stderr; 3 the updates were no longer finite, and 4 the
run's health asked for its end (health.stop), one line each; 1 a fault of the program, with its traceback; 130
stopped by Ctrl-C; 143 stopped by SIGTERM. Heavy imports stay inside the commands, so that `--help` answers at
once.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from rlhf_jax.cluster import leave_together, start
from rlhf_jax.errors import Halted, InputError
from rlhf_jax.settings import Config

CACHE = "~/.cache/rlhf_jax/xla"

app = typer.Typer(
    name="rlhf-jax",
    help="Turn human preferences into a better language model: reward model, PPO, evaluation, report.",
    epilog=f"Compiled programs are kept in {CACHE}; RLHF_JAX_CACHE moves them, RLHF_JAX_CACHE=off stops it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

ConfigFile = Annotated[
    str, typer.Argument(metavar="CONFIG.yaml", help="settings; what it leaves out has its default")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="key=value", help="settings over the file's; `rlhf-jax config --help` explains them all"
    ),
]


@app.callback()
def start_up(
    context: typer.Context,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", envvar="JAX_COORDINATOR_ADDRESS", help="process 0, as the others reach it"
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(envvar="JAX_NUM_PROCESSES", help="how many processes work together")
    ] = None,
    process: Annotated[
        int | None, typer.Option(envvar="JAX_PROCESS_ID", help="which of them this is, from 0")
    ] = None,
    pod: Annotated[bool, typer.Option("--pod", help="ask the metadata of a Cloud TPU pod instead")] = False,
    join_timeout: Annotated[float, typer.Option(help="seconds to wait for all of them")] = 300.0,
) -> None:
    """On several hosts, start the same command on each; SLURM and GKE say by themselves who is who."""
    context.obj = functools.partial(start, coordinator, processes, process, pod=pod, timeout_s=join_timeout)


@app.command()
def run(context: typer.Context, config: ConfigFile, settings: Overrides = None) -> None:
    """The whole job: SFT where asked for, reward model, PPO, evaluation, report, export."""
    _pipeline(context, "run", _read(config, settings))


@app.command()
def sft(context: typer.Context, config: ConfigFile, settings: Overrides = None) -> None:
    """Fine-tune the policy on the chosen responses."""
    _pipeline(context, "sft", _read(config, settings))


@app.command()
def reward(context: typer.Context, config: ConfigFile, settings: Overrides = None) -> None:
    """Train the reward model on preference pairs and keep the best."""
    _pipeline(context, "reward", _read(config, settings))


@app.command()
def ppo(context: typer.Context, config: ConfigFile, settings: Overrides = None) -> None:
    """Improve the policy against a trained reward model (reward.model is its directory)."""
    _pipeline(context, "ppo", _read(config, settings))


@app.command("eval")
def evaluate(context: typer.Context, config: ConfigFile, settings: Overrides = None) -> None:
    """Compare the run's best policy with the one it began from, on held-out prompts."""
    _pipeline(context, "evaluate", _read(config, settings, training=False))


@app.command()
def report(config: ConfigFile, settings: Overrides = None) -> None:
    """Make the pictures and report.html of run.dir again, from its records alone."""
    from rlhf_jax.report import write_report

    for path in write_report(_read(config, settings, training=False).run.dir):
        print(path)


@app.command()
def export(context: typer.Context, config: ConfigFile, settings: Overrides = None) -> None:
    """Write the newest checkpoint of run.dir as Hugging Face directories."""
    _pipeline(context, "export", _read(config, settings))


@app.command()
def debug(
    dump: Annotated[str, typer.Argument(metavar="DUMP", help="a folder such as RUN_DIR/dumps/ppo/12")],
    settings: Overrides = None,
) -> None:
    """Replay an update that was not finite, and name the first thing in it that is not.

    Takes the configuration and the checkpoints of the dump's run; key=value may move it to other devices.
    """
    _with_jax()
    _check_platforms()
    from rlhf_jax.trainers.debug import debug

    with _narration():
        said = debug(dump, settings or [])
    print(said)


class ConfigCommand(TyperCommand):
    """`config --help` goes on with every setting."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        _print_fields()


@app.command("config", cls=ConfigCommand)
def show_config(config: ConfigFile, settings: Overrides = None) -> None:
    """Print the resolved configuration, or say what is wrong with it. `--help` explains every setting.

    Comments below it name the parameters that a role's layout would split and cannot.
    """
    from rlhf_jax.config import to_yaml
    from rlhf_jax.layouts import splits_parameters

    resolved = _read(config, settings)
    print(to_yaml(resolved), end="")
    if splits_parameters(resolved):
        from rlhf_jax.trainers.fallback import whole_parameters

        for line in whole_parameters(resolved):
            print(f"# {line}")


@app.command("plan")
def plan_job(
    config: ConfigFile,
    settings: Overrides = None,
    *,
    topology: Annotated[
        str,
        typer.Option("--compile", metavar="TOPOLOGY", help="v5e:4x4, v5p:2x2x4, ... (needs libtpu), or host"),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object in place of tables")] = False,
) -> None:
    """Compile the programs of PPO for devices that need not be there: memory, collectives, does it fit."""
    resolved = _read(config, settings)
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # the compiler's seconds are asked for
    if topology not in ("host", "cpu"):
        os.environ["JAX_PLATFORMS"] = "cpu"  # takes no accelerator from those who use it
    _with_jax()
    from rlhf_jax.planning import report as planning

    with contextlib.nullcontext() if as_json else _narration():
        found = planning.plan(resolved, topology)
    print(json.dumps(planning.as_json(found)) if as_json else planning.as_text(found))


@app.command()
def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="directory or hub name of a language model")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="what the user says")],
    settings: Overrides = None,
) -> None:
    """Answer one prompt; rollout.* and run.seed apply, such as rollout.temperature=0."""
    from rlhf_jax.config import check, load_config

    config = load_config(None, settings or [])
    check(config, training=False)
    _with_jax()
    _check_platforms()
    from rlhf_jax.rollout import generate_text

    print(generate_text(model, prompt, config.rollout, config.run.seed))


@app.command()
def env() -> None:
    """Versions and devices, for a report of a fault."""
    import platform

    import jax

    from rlhf_jax.versions import versions

    for package, version in versions().items():
        print(f"{package} {version}")
    kinds = sorted({device.device_kind for device in jax.devices()})
    print(f"devices {jax.device_count()} x {', '.join(kinds)} ({jax.default_backend()})")
    print(f"processes {jax.process_count()}")
    print(f"platform {platform.platform()}")
    print(f"cpus {os.cpu_count()}")


def main(arguments: list[str] | None = None) -> None:
    """Run a command and leave with the exit code that fits."""
    arguments = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, _stop)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows ? for it
    try:
        code = app(arguments or ["--help"], prog_name="rlhf-jax", standalone_mode=False)
    except InputError as error:
        code = _complain(str(error))
        leave_together(code)
    except Halted as error:  # every process comes here at the same step
        _complain(str(error))
        code = error.code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
        leave_together(code)
    except SystemExit as leaving:
        if type(leaving) is SystemExit and isinstance(leaving.code, int):  # not a run's own, agreed end
            leave_together(leaving.code)
        raise
    except Exception as error:
        if not hasattr(error, "format_message"):
            leave_together(1, traceback.format_exc())
            raise
        code = _complain(f"{error.format_message().rstrip('.')}; `rlhf-jax --help` shows what there is")  # type: ignore
    sys.exit(code if isinstance(code, int) else 0)


def _stop(signal_number: int, frame: Any) -> None:
    """SIGTERM outside a training loop: nothing to save, but locks and files are closed."""
    raise SystemExit(128 + signal_number)


def _complain(message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2


def _read(path: str, settings: list[str] | None, *, training: bool = True) -> Config:
    from rlhf_jax.config import check, load_config

    config = load_config(path, settings or [])
    check(config, training=training)
    return config


def _pipeline(context: typer.Context, job: str, config: Config) -> None:
    """A job on the devices of this process and of those that it is started with."""
    _with_jax()
    import importlib

    with _narration():
        context.obj()
        _check_platforms()
        getattr(importlib.import_module("rlhf_jax.trainers.pipeline"), job)(config)


class _Narrator(logging.Handler):
    """What the package logs as plain lines: notes on stdout, beside the progress, and warnings on stderr.

    Of several processes only the first one speaks.
    """

    def emit(self, record: logging.LogRecord) -> None:
        from rlhf_jax.sharding.processes import is_primary

        if not is_primary():
            return
        if record.levelno < logging.WARNING:
            print(record.getMessage(), flush=True)
        else:
            print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _narration() -> Iterator[None]:
    logger, narrator = logging.getLogger("rlhf_jax"), _Narrator()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(narrator)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(narrator)
        logger.setLevel(level)
        logger.propagate = propagate


def _with_jax() -> None:
    """Keep compiled programs between commands, and transformers from asking for PyTorch."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    place = os.environ.get("RLHF_JAX_CACHE", CACHE)
    if place.lower() in ("off", "0", "") or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    import jax

    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(place).expanduser()))


def _check_platforms() -> None:
    import jax

    asked = os.environ.get("JAX_PLATFORMS")
    if asked is None:
        return
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        reason = f" ({error})" if str(error) else ""
        raise InputError(
            f"JAX_PLATFORMS={asked} gives no devices{reason}; unset it or install the extra"
        ) from error


def _print_fields() -> None:
    from rich.console import Console
    from rich.table import Table

    from rlhf_jax.config import field_help

    console, table = Console(highlight=False), None
    for name, type_name, default, explanation in field_help():
        if not type_name:
            if table is not None:
                console.print(table)
            console.print(f"\n[bold]{name}[/bold]  {explanation}")
            table = Table.grid(padding=(0, 2))
            table.add_column(no_wrap=True)
            table.add_column()
        elif table is not None:
            shown = "" if type_name.startswith("{") else f" [dim]({type_name})[/dim]"
            table.add_row(f"  [cyan]{name}[/cyan]={default}", explanation + shown)
    console.print(table)


if __name__ == "__main__":
    main()
