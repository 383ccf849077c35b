from io import StringIO

from rich.console import Console

from proofserve.receiver.store import ClaimSource, Summary, render


def _text(summary: Summary, width: int) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(render(summary))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_an_empty_book_says_so() -> None:
    assert "nothing received yet" in _text(Summary(0, 0, None, ()), 100)


def test_the_table_shows_every_count() -> None:
    source = ClaimSource("k3y", "b10c", 12_345, 54_321, 6, 7, 8, 1e9)
    text = _text(Summary(9, 10, 1e9, (source,)), 100)
    assert "9 callbacks, 10 repeated, last at 01:46:40 UTC" in text
    row = next(line for line in text.splitlines() if "k3y" in line)
    assert [cell.strip() for cell in row.strip("│┃").split("│")] == [
        "k3y",
        "b10c",
        "12,345",
        "54,321",
        "6",
        "7",
        "8",
        "01:46:40",
    ]


def test_forks_are_in_the_title_where_there_are_some() -> None:
    assert "forks" not in _text(Summary(9, 0, 1e9, ()), 100)
    assert "01:46:40 UTC, 2 forks in logs of receipts" in _text(Summary(9, 0, 1e9, (), 2), 100)


def test_roots_have_a_column_where_they_came() -> None:
    source = ClaimSource("k" * 66, "b" * 64, 0, 0, 6, 7, 8, 1e9, committed=98_304)
    text = _text(Summary(1, 0, 1e9, (source,)), 80)
    for whole in ("committed", "98,304", "artifacts", "validations", "kkkk", "bbbb"):
        assert whole in text
    assert "winners" not in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_long_hashes_do_not_push_the_counts_out() -> None:
    source = ClaimSource("k" * 200, "b" * 64, 12_345, 54_321, 0, 0, 0, 1e9)
    text = _text(Summary(1, 0, 1e9, (source,)), 80)
    for whole in ("12,345", "54,321", "01:46:40", "artifacts", "winners", "validations"):
        assert whole in text
    # Enough of both is left to know them by.
    assert "kkkk" in text
    assert "bbbb" in text
    assert all(len(line) <= 80 for line in text.splitlines())
