"""Plain text where no person watches, nothing lost in narrow tables, and progress that does not flood a log."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from trainplan.costmodel.estimate import Estimate, Interval, StageMemory
from trainplan.costmodel.plan import SearchRecord
from trainplan.planner.render import plan as screen
from trainplan.planner.render.console import console, is_plain, line, table
from trainplan.planner.render.progress import Lines, describe, measuring, shown
from trainplan.planner.search import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.parametrize(
    ("stream", "environment", "plain"),
    [
        (Terminal(), {"TERM": "xterm"}, False),
        (io.StringIO(), {"TERM": "xterm"}, True),
        (Terminal(), {"TERM": "dumb"}, True),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": "1"}, True),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": ""}, False),
        (Terminal(), {"TERM": "xterm", "CI": "true"}, True),
    ],
)
def test_plain_text_where_no_person_watches(stream: io.StringIO, environment: dict[str, str], plain: bool) -> None:
    assert is_plain(stream, environment) is plain


def written(show: Callable[[Console], object], stream: io.StringIO | None = None) -> str:
    stream = stream or io.StringIO()
    show(console(stream))
    return stream.getvalue()


def test_a_terminal_gets_bold_titles_and_a_file_none() -> None:
    def show(to: Console) -> None:
        table(to, [("a", "b")], headers=("x", "y"))

    assert "\x1b[" in written(show, Terminal())
    assert written(show) == "x  y\na  b\n"


def test_numbers_line_up_on_the_right() -> None:
    assert written(lambda to: table(to, [("a", "1"), ("b", "10")], right=(1,))) == "a   1\nb  10\n"


def test_a_narrow_table_wraps_and_loses_nothing() -> None:
    name, words = "n" * 40, " ".join(f"word{i}" for i in range(40))
    text = written(lambda to: table(to, [(name, words)]))
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[0].startswith(name)
    assert text.split() == [name, *words.split()]


def test_markup_in_a_name_is_no_markup() -> None:
    assert written(lambda to: line(to, "[bold]x[/bold] :smile:")) == "[bold]x[/bold] :smile:\n"


def test_a_command_stays_on_one_line() -> None:
    command = "planner " + "x" * 200
    assert written(lambda to: line(to, command)) == command + "\n"


def progress(phase: str = "sampling", priced: int = 1200, best: float | None = 9.82) -> Progress:
    return Progress(phase, priced, 48000 if phase == "sampling" else 0, best)


def test_progress_in_words() -> None:
    assert describe(progress()) == "sampling 1,200 of 48,000 strategies, best step 9.82 s"
    assert describe(progress("searching", best=None)) == "searching 1,200 strategies"


def test_a_log_gets_a_line_per_phase_and_one_every_two_seconds() -> None:
    stream, clock = io.StringIO(), iter([0.0, 0.1, 0.2, 1.9, 2.3, 2.4])
    lines = Lines(stream, lambda: next(clock))
    for phase in ("searching", "searching", "sampling", "sampling", "sampling", "sampling"):
        lines(progress(phase))
    assert [text.split()[0] for text in stream.getvalue().splitlines()] == ["searching", "sampling", "sampling"]


def test_a_bar_leaves_nothing_on_a_terminal_but_control_codes() -> None:
    stream = Terminal()
    with shown(stream) as report:
        report(progress())
        report(progress(priced=48000))
    assert "\x1b[" in stream.getvalue()
    assert stream.getvalue().endswith(("\x1b[2K", "\x1b[?25h"))  # the line is cleared, the cursor shown


def test_measuring_writes_one_line_per_kind() -> None:
    stream = io.StringIO()
    with measuring(stream) as report:
        report("all_reduce of 1024", 0.25)
        report("all_reduce of 65536", 0.5)
        report("attention", 0.75)
    assert stream.getvalue() == "measuring all_reduce (25.0 % done)\nmeasuring attention (75.0 % done)\n"
    terminal = Terminal()
    with measuring(terminal) as report:
        report("attention", 0.75)
    assert "\x1b[" in terminal.getvalue()


def spot(value: float) -> Interval:
    return Interval(low=value, mid=value, high=value)


def estimate(num_stages: int, limit_bytes: float, **changes: Any) -> Estimate:
    stages = [
        StageMemory(
            stage=i,
            breakdown_bytes={"parameters": 2**30 * (i + 1.0)},
            allocated_bytes=2**30 * (i + 1.0),
            reserved_bytes=spot(2**30 * (i + 1.0)),
            device_bytes=spot(2**30 * (i + 1.0)),
        )
        for i in range(num_stages)
    ]
    return Estimate(
        step_time_s=spot(1.0), breakdown_s={"forward": 1.0}, tokens_per_s=1.0, useful_token_frac=1.0, mfu=0.5,
        bubble_frac=0.0, exposed_comm_s=0.0, stages=tuple(stages), memory_limit_bytes=limit_bytes,
        weakest_provenance="fitted", **changes,
    )  # fmt: skip


def test_memory_is_shown_per_stage_against_the_limit() -> None:
    text = written(lambda to: screen.print_memory(to, estimate(2, 4 * 2**30), 4 * 2**30))
    assert "Memory per rank, limit 4.00 GiB" in text
    assert [row.split()[:3] for row in text.splitlines() if row.strip()[:1] in ("0", "1")] == [
        ["0", "1.00", "GiB"],
        ["1", "2.00", "GiB"],
    ]
    assert "2.00 GiB stay free at the 95 % point." in text
    assert "Tensors of stage 1 at its peak" in text


def test_what_does_not_fit_says_by_how_much() -> None:
    assert "1.00 GiB too much" in written(lambda to: screen.print_memory(to, estimate(2, 2**30), 2**30))


def test_of_many_stages_the_fullest_are_shown() -> None:
    text = written(lambda to: screen.print_memory(to, estimate(40, 2**40), 2**40))
    assert "The 16 fullest of 40 stages." in text
    assert "\n   39 " in text
    assert "\n    0 " not in text


@pytest.mark.parametrize(
    ("gap", "proven", "words"),
    [
        (0.0, True, "the winner is the fastest of them"),
        (0.005, True, "none is faster than the winner by more than 0.5 %"),
        (0.0, False, "sampled: a better one may exist"),
    ],
)
def test_a_search_claims_what_it_has_shown(gap: float, proven: bool, words: str) -> None:
    record = SearchRecord(
        engine="enumerate", covered=100, illegal={"heads": 5, "layers": 20}, infeasible=60, feasible=15, dropped=20,
        simulated=7, gap_frac=gap, proven=proven,
    )  # fmt: skip
    text = written(lambda to: screen.print_search(to, record))
    assert words in text
    assert "layers 20, heads 5" in text
    assert text.index("covered") < text.index("illegal") < text.index("too large") < text.index("feasible")
    assert re.search(r"left out +20 .*slower", text)
    assert re.search(r"simulated +7", text)
