from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agl_runtime.trainer.backends.embedded.codec import Codec
from agl_runtime.trainer.backends.embedded.text import StopFilter, overlap

TEXTS = st.text(alphabet=st.sampled_from("ab é東🙂\n"), max_size=20)


def pieces_of(codec: Codec, ids: list[int]) -> list[str]:
    text = codec.detokenizer()
    return [*(text.push([token_id]) for token_id in ids), text.finish()]


@given(text=TEXTS)
def test_pieces_add_up_to_the_text(codec: Codec, text: str) -> None:
    assert "".join(pieces_of(codec, codec.encode(text, special=False))) == text


@given(ids=st.lists(st.integers(3, 258), max_size=12))
def test_pieces_of_any_bytes_add_up_to_what_the_tokenizer_decodes(codec: Codec, ids: list[int]) -> None:
    assert "".join(pieces_of(codec, ids)) == codec.decode(ids)


def test_a_character_of_several_tokens_comes_whole_or_not_at_all(codec: Codec) -> None:
    ids = codec.encode("🙂", special=False)
    assert len(ids) > 1
    assert pieces_of(codec, ids) == [*[""] * (len(ids) - 1), "🙂", ""]


def test_bytes_that_never_become_a_character_end_as_replacement_characters(codec: Codec) -> None:
    ids = codec.encode("a🙂", special=False)[:-1]
    assert pieces_of(codec, ids)[-1] == "\ufffd"


@given(text=TEXTS, size=st.integers(1, 5))
def test_ids_pushed_in_groups_give_the_same_text(codec: Codec, text: str, size: int) -> None:
    ids = codec.encode(text, special=False)
    stream = codec.detokenizer()
    got = "".join(stream.push(ids[at : at + size]) for at in range(0, len(ids), size)) + stream.finish()
    assert got == text


def filtered(parts: list[str], cuts: list[str], closers: list[str]) -> tuple[str, bool]:
    stops = StopFilter(cuts, closers)
    text = "".join(stops.push(part) for part in parts)
    return text + stops.finish(), stops.hit


STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=3)


@given(text=st.text(alphabet="abc", max_size=12), cuts=STOPS, size=st.integers(1, 4))
def test_text_ends_before_the_first_stop_however_it_arrives(text: str, cuts: list[str], size: int) -> None:
    # A stop is recognised when its last character has come, so the earliest end decides, then the earliest begin.
    found = min(((text.find(cut) + len(cut), text.find(cut)) for cut in cuts if cut in text), default=None)
    parts = [text[at : at + 1] for at in range(len(text))]
    assert filtered(parts, cuts, []) == (text[: found[1]] if found else text, found is not None)
    grouped = [text[at : at + size] for at in range(0, len(text), size)]
    assert filtered(grouped, cuts, [])[1] == (found is not None)


def test_what_could_begin_a_stop_is_held_until_it_is_known() -> None:
    stops = StopFilter(["END"])
    assert [stops.push(part) for part in ("a E", "N", "xEN", "D after")] == ["a ", "", "ENx", ""]
    assert stops.hit


def test_held_text_is_given_at_the_end() -> None:
    assert filtered(["a EN"], ["END"], []) == ("a EN", False)


def test_a_closer_stays_in_the_text() -> None:
    assert filtered(["x</call> more"], [], ["</call>"]) == ("x</call>", True)


def test_overlap_is_the_longest_end_that_begins_the_mark() -> None:
    assert [overlap(text, "aab") for text in ("aa", "a", "baa", "aab", "")] == [2, 1, 2, 0, 0]
