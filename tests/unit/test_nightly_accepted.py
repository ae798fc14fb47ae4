"""Accepted changes: a file that people can read, edit and merge."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly_points import night, point, write_suite

from harness.errors import UsageError
from harness.nightly import folders, measuring
from harness.nightly.accept import Wish, accept
from harness.nightly.accepted import (
    HEAD,
    Accepted,
    add,
    known_bad,
    read_accepted,
    restart_of,
)
from harness.nightly.folders import NightFolder
from harness.nightly.records import EntryPoints, Finding
from harness.nightly.suite import Loaded, read_suite

NAMES = st.from_regex(r"[a-z0-9./*_-]{1,30}", fullmatch=True)
NIGHTS = st.dates().map(str).filter(lambda t: len(t) == 10)
CHANGES = st.builds(
    Accepted,
    series=NAMES,
    since=NIGHTS,
    kind=st.sampled_from(["accepted", "known-bad"]),
    reason=st.text(min_size=1, max_size=80).filter(lambda t: " ".join(t.split()).isprintable()),
    until=st.none() | NIGHTS,
)


@given(st.lists(CHANGES, max_size=6))
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, changes: list[Accepted]
) -> None:
    changes = [msgspec.structs.replace(c, reason=" ".join(c.reason.split())) for c in changes]
    changes = [c for c in changes if c.reason]
    path = tmp_path_factory.mktemp("a") / "x.accepted.toml"
    for change in changes:
        add(path, change)
    last = {(c.series, c.since, c.kind): c for c in changes}.values()
    assert sorted(map(repr, read_accepted(path))) == sorted(map(repr, last))


def test_one_change_of_a_night_replaces_the_earlier_word(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    add(path, Accepted(series="b/*", since="2026-09-02", reason="first"))
    add(path, Accepted(series="a/*", since="2026-09-02", reason="kept"))
    add(path, Accepted(series="b/*", since="2026-09-02", reason="second"))
    assert [c.reason for c in read_accepted(path)] == ["kept", "second"]
    lines = path.read_text().splitlines()
    assert lines.index('series = "a/*"') < lines.index('series = "b/*"')


BY_HAND = """\
# The head of a person.

# Why b: see the ticket.
[[change]]  # one
series = "b/*"
reason = "first # of two" # said on Monday
since = '2026-09-02'

   # a thought between

# c is another matter
[[change]]
series = "c"
since = "2026-09-01"
reason = "kept"
# the end"""


def test_what_people_wrote_stays(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(BY_HAND)
    add(path, Accepted(series="b/*", since="2026-09-02", reason='now "so"'))
    replaced = path.read_text()
    assert replaced == BY_HAND.replace(
        """reason = "first # of two" # said on Monday
since = '2026-09-02'
""",
        """reason = "now \\"so\\""  # said on Monday
since = '2026-09-02'
kind = "accepted"
""",
    )
    new = '[[change]]\nseries = "bb"\nsince = "2026-09-02"\nkind = "accepted"\nreason = "new"\n\n'
    add(path, Accepted(series="bb", since="2026-09-02", reason="new"))
    assert path.read_text() == replaced.replace("# c is another", f"{new}# c is another")
    add(path, Accepted(series="d", since="2026-09-02", reason="last"))
    assert path.read_text().startswith(replaced[:60])
    assert "# the end\n\n[[change]]\n" in path.read_text()
    assert [c.series for c in read_accepted(path)] == ["b/*", "bb", "c", "d"]


def test_a_key_that_goes_leaves_its_comment(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    bad = Accepted(series="a", since="2026-09-02", kind="known-bad", reason="r", until="2026-12-31")
    add(path, bad)
    path.write_text(path.read_text().replace('"2026-12-31"', '"2026-12-31"  # the release'))
    add(path, msgspec.structs.replace(bad, until=None))
    assert path.read_text().endswith('reason = "r"\n# the release\n')
    assert read_accepted(path) == (msgspec.structs.replace(bad, until=None),)


@pytest.mark.parametrize(
    "text",
    [
        '# why\nchange = [{series = "a", since = "2026-09-01", reason = "r"}]\n',
        '# why\n[[change]]\nseries = "a"\nsince = "2026-09-01"\n"reason" = "r"\n',
        '# why\n[[change]]\nseries = "a"\nsince = "2026-09-01"\nreason = """\n[[change]]\n"""\n',
    ],
)
def test_a_file_that_cannot_be_kept_as_it_is_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"cannot be added to and kept as it is"):
        add(path, Accepted(series="a", since="2026-09-01", reason="other"))
    assert path.read_text() == text


@settings(max_examples=40)
@given(st.lists(CHANGES, max_size=5), CHANGES, st.lists(st.integers(0, 30), max_size=6))
def test_whatever_is_added_comments_stay(
    tmp_path_factory: pytest.TempPathFactory,
    changes: list[Accepted],
    change: Accepted,
    places: list[int],
) -> None:
    def plain(one: Accepted) -> Accepted:
        return msgspec.structs.replace(one, reason=" ".join(one.reason.split()) or "x")

    def key(one: Accepted) -> tuple[str, str, str]:
        return one.series, one.since, one.kind

    known = list({key(c): plain(c) for c in changes}.values())
    path = tmp_path_factory.mktemp("a") / "x.accepted.toml"
    path.write_text(HEAD, "utf-8")
    for one in known:
        add(path, one)
    lines = path.read_text("utf-8").split("\n")
    for number, place in enumerate(places):
        lines.insert(place, f"# thought {number}")
    path.write_text("\n".join(lines), "utf-8")
    add(path, plain(change))
    text = path.read_text("utf-8")
    assert all(f"# thought {number}\n" in f"{text}\n" for number in range(len(places)))
    wanted = [c for c in known if key(c) != key(change)] + [plain(change)]
    assert sorted(map(repr, read_accepted(path))) == sorted(map(repr, wanted))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[changes]]\n", "did you mean 'change'?"),
        ('[[change]]\nseries = "a"\nsince = "2026-09-01"', "'reason' is missing"),
        ('[[change]]\nseries = "a"\nsince = "soon"\nreason = "x"', "'soon' is no night"),
        ('[[change]]\nseries = "a"\nsince = "2026-09-01"\nreason = " "', "give a reason"),
        ('[[change]]\nserie = "a"', "did you mean 'series'?"),
        (
            '[[change]]\nseries="a"\nsince="2026-09-01"\nreason="x"\nuntil="2026-13-01"',
            "is no date",
        ),
        ('[[change]]\nseries="a"\nsince="2026-09-01"\nreason="x"\nkind="bad"', "known-bad"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(UsageError) as error:
        read_accepted(tmp_path / "x.toml")
    assert said in str(error.value) and "x.toml" in str(error.value)


def test_the_latest_accepted_night_counts_and_known_bad_ends() -> None:
    changes = (
        Accepted(series="a/*", since="2026-09-09", reason="one"),
        Accepted(series="a/x", since="2026-09-10.2", reason="two"),
        Accepted(series="a/x", since="2026-09-10", reason="three"),
        Accepted(
            series="a/y", since="2026-09-10", kind="known-bad", reason="k", until="2026-09-20"
        ),
    )
    found = restart_of(changes, "a/x")
    assert found is not None and found.reason == "two"
    assert restart_of(changes, "b/x") is None
    assert known_bad(changes, "a/y", "2026-09-20") is not None
    assert known_bad(changes, "a/y", "2026-09-21") is None
    assert known_bad(changes, "a/y", "2026-09-09") is None


SERIES = "chat/vllm/speculative/c8/output_tokens_per_s"


@pytest.fixture
def measured(tmp_path: Path) -> Loaded:
    """A suite with one night that told a loss."""
    path = write_suite(
        tmp_path, f'name = "s"\nresults = "{tmp_path}/r"\n[[entries]]\nname = "chat"'
    )
    folder = NightFolder(folders.suite_folder(tmp_path / "r", "s") / "2026-09-02")
    told = Finding(
        series=SERIES, entry="chat", source="series", kind="step", direction="worse",
        status="confirmed", before=100.0, after=90.0, ratio=0.9, found="2026-09-02",
        first_bad="2026-09-02",
    )  # fmt: skip
    folder.write(night(1, findings=(told,)))
    folder.write_points(
        EntryPoints(
            entry="chat", digest="d", night="2026-09-02", run="run-2", points=(point(90.0),)
        )
    )
    (tmp_path / "r" / "run-2").mkdir()
    return read_suite(path)


def test_accepting_records_the_night_that_told_it(measured: Loaded) -> None:
    told = accept(measured, Wish(series="chat", reason="new kernel, slower on purpose"))
    (change,) = read_accepted(measured.accepted)
    assert (change.series, change.since, change.kind) == ("chat/*", "2026-09-02", "accepted")
    assert "accepted since the night of 2026-09-02" in told[0]
    table = tomllib.loads(measured.accepted.read_text())
    assert set(table["change"][0]) == {"series", "since", "kind", "reason"}


def test_pinning_replaces_the_baseline_and_keeps_its_run(measured: Loaded) -> None:
    accept(measured, Wish(series=SERIES, reason="better", pin=True))
    results = measured.results.resolve()
    pinned = folders.read_baseline(results, "s", "chat")
    assert pinned is not None and pinned.run == "run-2" and pinned.reason == "better"
    labels = (results / "run-2" / measuring.LABELS).read_text()
    assert "baseline of s, chat" in labels


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (Wish(series=SERIES, reason=" "), "--reason"),
        (Wish(series="chat/vllm/x", reason="r"), "no such series"),
        (Wish(series=SERIES, reason="r", since="2026-08-01"), "no such night"),
        (Wish(series=SERIES, reason="r", until="2026-12-01"), "--known-bad"),
        (Wish(series=SERIES, reason="r", known_bad=True, until="tomorrow"), "is no date"),
        (Wish(series=SERIES, reason="r", known_bad=True, pin=True), "--pin"),
    ],
)
def test_a_wrong_wish_changes_nothing(measured: Loaded, wish: Wish, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        accept(measured, wish)
    assert not measured.accepted.exists()


def test_a_baseline_is_a_link_that_the_history_passes_over(measured: Loaded) -> None:
    from harness.history.folders import find

    results = measured.results.resolve()
    (results / "run-2" / "manifest.json").write_text("{}")
    accept(measured, Wish(series=SERIES, reason="good", pin=True))
    link = results / "baselines" / "s" / "chat"
    assert link.resolve() == results / "run-2"
    assert [(f.shown, f.reason) for f in find(results)] == [("run-2", None)]


CHANGE = Accepted(series="b/*", since="2026-09-02", reason="second")


@pytest.mark.parametrize("reason", ["\u202e", "\x00\x1b", "\u2028 \ufeff"])
def test_a_reason_of_which_nothing_is_printed_is_none(tmp_path: Path, reason: str) -> None:
    """Written, it would be an empty one, and no night could read the file again."""
    path = tmp_path / "x.toml"
    with pytest.raises(UsageError, match="give a reason"):
        add(path, msgspec.structs.replace(CHANGE, reason=reason))
    assert not path.exists()


@pytest.mark.parametrize(
    "text",
    [BY_HAND + "\n", '# mine\n[[change]]\nseries = "a"\nsince = "2026-09-01"\nreason = "x"\n'],
)
def test_lines_that_end_as_on_windows_still_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(text.replace("\n", "\r\n").encode())
    add(path, CHANGE)
    made = path.read_bytes()
    assert made.count(b"\r\n") == made.count(b"\n") == made.count(b"\r")
    assert CHANGE in read_accepted(path)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("\ufeff# mine\n".encode(), "byte order mark"),
        (b'[[change]]\rseries = "a"\rsince = "2026-09-01"\rreason = "x"\r', "by hand"),
    ],
)
def test_a_file_of_another_editor_is_told_and_kept(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=why):
        add(path, CHANGE)
    assert path.read_bytes() == data


def test_a_link_stays_one_and_its_file_is_written(tmp_path: Path) -> None:
    path, real = tmp_path / "x.toml", tmp_path / "shared" / "real.toml"
    real.parent.mkdir()
    add(real, Accepted(series="a/*", since="2026-09-02", reason="kept"))
    path.symlink_to("shared/real.toml")
    add(path, CHANGE)
    assert path.is_symlink() and len(read_accepted(real)) == 2
    for nothing in ("nowhere.toml", "loop.toml"):
        link = tmp_path / "loop.toml"
        link.symlink_to(nothing)
        with pytest.raises(UsageError, match="link to nothing"):
            add(link, CHANGE)
        with pytest.raises(UsageError, match="link to nothing"):
            read_accepted(link)  # a night would not hear of what was accepted
        assert link.is_symlink()
        link.unlink()
