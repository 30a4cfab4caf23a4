"""A plan, and the promises beside the arithmetic, for people: tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_specx.config import ConfigError
from vllm_specx.plan import claims
from vllm_specx.plan.claims import Checked, Range, Size
from vllm_specx.plan.planner import Plan, curves

GB = 1e9
_SAID = {
    "formula": "the formula: verifying K+1 tokens of {batch} costs what reading the weights costs",
    "roofline": "the roofline: from some K on, verifying K+1 tokens of {batch} is computing, not reading",
    "measured": "the formula with the step times that were given",
}


def headline(made: Plan) -> list[str]:
    """What is planned, and on what its figures rest, a line each."""
    target, speed = made.target, made.speed
    how = "no speculation" if made.draft.kind == "none" else str(made.pairing.method)
    name = f" with {made.draft.name}" if made.draft.name else ""
    acceptance = ", ".join(f"{a:.2f}" for a in made.acceptance)
    batch = f"{made.batch} requests" if made.batch > 1 else "one request"
    lines = [
        f"{made.pairing.recipe.name}: {target.name}, {how}{name}, on {made.count} x {made.gpu}. Predicted, "
        "not measured.",
        f"Floor: reading {target.read_bytes / GB:.1f} GB of weights takes {made.floor * 1e3:.1f} ms at the "
        f"data sheet's bandwidth, so one stream has at most {1 / made.floor:.1f} tokens/s without "
        f"speculation; a plain step is taken to be {speed.plain * 1e3:.1f} ms "
        f"({made.batch} x {made.context} tokens of context).",
    ]
    if len(speed.rows) < 2:
        return lines
    lines += [
        f"Acceptance {acceptance} ({made.acceptance_from}); gamma {speed.gamma:.3f} ({made.gamma_from}).",
        f"Shown is {_SAID[speed.shown].format(batch=batch)}.",
    ]
    return lines


def speed_table(made: Plan) -> Any:
    """A rich.table.Table: a row for each K."""
    from rich.table import Table

    shown = Table(title="Speed by K, every request drafting")
    for name in (
        "K",
        "tokens a step",
        "verify",
        "draft share",
        "speed-up",
        "tok/s a request",
        "tok/s",
    ):
        shown.add_column(name, justify="right")
    shown.add_column("loses below acceptance", justify="right")
    best = made.speed.best
    for row in made.speed.rows:
        whole = row.verify + row.draft
        even = "-" if row.k == 0 else "any" if row.break_even is None else f"{row.break_even:.2f}"
        shown.add_row(
            str(row.k),
            f"{row.tokens:.2f}",
            f"{row.verify:.2f}x",
            f"{row.draft / whole:.0%}",
            f"{row.speed_up:.2f}x",
            f"{row.rate:.1f}",
            f"{row.rate * made.batch:.0f}",
            even,
            style="bold" if row is best else None,
        )
    return shown


def memory_table(made: Plan) -> Any:
    """A rich.table.Table: where a GPU's memory goes."""
    from rich.table import Table

    memory = made.memory
    shown = Table(title=f"Memory of each {made.gpu}, GB")
    shown.add_column("part")
    shown.add_column("GB", justify="right")
    kv = memory.kv_bytes(made.batch, made.context)
    parts = [
        ("target", memory.target),
        ("draft or heads", memory.draft),
        ("the draft's own K/V cache", memory.draft_cache),
        (f"K/V cache, {made.batch} x {made.context} tokens", kv),
        ("activations (estimate)", memory.activations),
        ("CUDA context and graphs (round figure)", memory.runtime),
    ]
    for name, size in parts:
        shown.add_row(name, f"{size / GB:.2f}")
    shown.add_section()
    shown.add_row("sum", f"{(memory.fixed + kv) / GB:.2f}", style=None if made.fits else "bold red")
    usable = f"{memory.usable / GB:.2f}"
    shown.add_row(f"usable of {memory.capacity / GB:.0f}", usable)
    return shown


def verdict(made: Plan) -> list[str]:
    """What follows, a sentence each."""
    memory, best = made.memory, made.speed.best
    said = []
    if memory.kv_room < memory.kv_bytes(1, 1):
        short = (memory.fixed - memory.usable) / GB
        said.append(
            f"It does not fit: the models alone need {short:.1f} GB more on each GPU. Use more or larger "
            "GPUs, a quantized target, or a smaller draft."
        )
    else:
        said.append(
            f"{'It fits' if made.fits else 'That much context does not fit'}: {memory.kv_tokens} tokens of "
            f"context in all, that is {memory.largest_batch(made.context)} requests of {made.context} "
            f"tokens, or {made.batch} of {made.largest_context} tokens"
            f"{' (its max-model-len)' if made.largest_context == made.longest else ''}."
        )
    if len(made.speed.rows) > 1:
        if best.k == 0:
            said.append("Speculation does not pay here: every K is slower than none.")
        else:
            share = best.draft / (best.verify + best.draft)
            said.append(
                f"Best is K={best.k}: {best.speed_up:.2f}x, {best.rate:.1f} tokens/s a request; drafting is "
                f"{share:.0%} of a step."
            )
    return said + [f"Note: {note}." for note in made.notes]


def plot(made: Plan, path: Path) -> None:
    """A picture: speed-up over acceptance for each K. Raises ConfigError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    alphas = [i / 100 for i in range(101)]
    most = made.speed.rows[-1].k
    ks = [k for k in (1, 2, 3, 4, 5, 6, 8, 12, 16) if k <= most]
    figure, axes = pyplot.subplots(figsize=(7.5, 4.8))
    for k, gains in curves(made, ks, alphas).items():
        axes.plot(alphas, gains, label=f"K={k}")
    axes.axhline(1.0, color="#888888", lw=0.8)
    if len(made.acceptance) == 1:
        axes.axvline(made.acceptance[0], color="#888888", lw=0.8, ls=":")
    axes.set_xlabel("acceptance of a draft token, given those before it")
    axes.set_ylabel("speed-up (predicted)")
    axes.set_title(
        f"{made.pairing.recipe.name}: {made.count} x {made.gpu}, batch {made.batch}", fontsize=10
    )
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}: {error}.") from None
    finally:
        pyplot.close(figure)


def promises(checked: Sequence[Checked]) -> Any:
    """A rich.table.Table: workloads, what is promised, what the arithmetic says."""
    from rich.table import Table

    shown = Table(
        title=f"Promised by workload, and by the formula at gamma {claims.GAMMA}; verify: by the roofline of "
        f"{claims.TARGET} on {claims.RANKS} x {claims.GPU}"
    )
    shown.add_column("workload")
    for name in ("acceptance", "K", "promised", "formula", "best K"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("verdict")
    for batch in claims.BATCHES:
        shown.add_column(f"batch {batch}", justify="right", no_wrap=True)
    for each in checked:
        promise = each.promise
        shown.add_row(
            promise.workload,
            f"{promise.acceptance[0]:.2f}-{promise.acceptance[1]:.2f}",
            f"{promise.k[0]}-{promise.k[1]}",
            _gains(promise.gain),
            _gains(each.gain),
            f"{each.best[0]}-{each.best[1]}",
            each.verdict,
            *(
                _gains(gain) + (" !" if judged == "optimistic" else "")
                for gain, judged in each.by_batch.values()
            ),
        )
    return shown


def promised_sizes(found: Sequence[Size]) -> Any:
    """A rich.table.Table: the memory that methods are promised to take, and take."""
    from rich.table import Table

    shown = Table(
        title="Promised extra memory, and the weights by their sizes (bfloat16, no caches)"
    )
    shown.add_column("method")
    shown.add_column("promised", justify="right")
    shown.add_column("of")
    shown.add_column("GB", justify="right")
    shown.add_column("verdict")
    for size in found:
        low, high = size.promised
        promised = f"{low / GB:g}-{high / GB:g} GB" if low else f"< {high / GB:g} GB"
        for name, value in size.actual.items():
            shown.add_row(size.method, promised, name, f"{value / GB:.2f}", size.verdict(value))
    return shown


PROMISES_READ = (
    "agrees: the formula reaches what is promised. careful: it gives more than is promised at either end, "
    "so the promise leaves room for what the formula leaves out. optimistic, or ! beside a batch: it does "
    "not reach it."
)


def _gains(gain: Range) -> str:
    return f"{gain[0]:.2f}-{gain[1]:.2f}x"
