from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from dapo.data.distinct import Distinct, RowCounts, answer_key, columns_key, question_key


def key(*texts):
    return question_key([{"role": "user", "content": text} for text in texts])


def test_questions_that_differ_only_in_spacing_or_compatibility_forms_are_equal():
    assert key("a  b\n c ") == key("a b c") == key("a", "b c")
    assert key("x² ﬁ １") == key("x2 fi 1")
    assert len({key("a b"), key("A b"), key("ab"), key("a b."), key("é"), key("e")}) == 6


def test_answers_are_compared_as_text_and_not_by_type():
    assert answer_key(34) == answer_key("34") == answer_key(" 34\n") == answer_key(34.0)
    assert answer_key({"b": 1, "a": [2]}) == answer_key({"a": [2], "b": 1})
    assert len({answer_key(value) for value in (34, 34.5, "thirty-four", [34], True, None)}) == 6


def test_the_first_row_is_kept_and_conflicting_questions_are_dropped():
    distinct = Distinct()
    rows = [("q1", "1"), ("q2", "1"), ("q1", "1"), ("q2", "2"), ("q2", "1"), ("q3", "1")]
    assert [distinct.add(key(q), answer_key(a)) for q, a in rows] == [True, True, False, False, False, True]
    assert [distinct.is_conflict(key(q)) for q in ("q1", "q2", "q3")] == [False, True, False]
    assert distinct.counts() == RowCounts(rows=6, distinct=3, duplicates=1, conflicts=1, conflict_rows=3)
    assert distinct.counts().summary() == (
        "6 rows, 3 distinct, 1 duplicate left out, 1 question with conflicting answers left out (3 rows)"
    )


def test_the_key_of_columns_holds_exactly_what_the_judge_sees():
    row = {"level": 3, "tests": ["a"]}
    assert columns_key("x", row, ()) == columns_key("y", {}, {"other"}) == b""
    assert columns_key("x", row, {"level"}) == columns_key("y", {"level": 3}, {"level"})
    assert columns_key("x", row, None) == columns_key("x", {"tests": ["a"], "level": 3}, None)
    assert len({columns_key("x", {"t": text}, None) for text in ("a b", "a  b", "A b")}) == 3
    assert columns_key("x", row, {"data_source"}) != columns_key("y", row, {"data_source"})


def test_rows_with_other_columns_are_distinct_unless_their_answers_disagree():
    distinct = Distinct()
    rows = [
        ("q1", "1", b"a"),
        ("q1", "1", b"b"),
        ("q1", "1", b"b"),
        ("q1", "1", b"a"),
        ("q2", "1", b"a"),
        ("q2", "2", b"b"),
    ]
    added = [distinct.add(key(q), answer_key(a), columns=c) for q, a, c in rows]
    assert added == [True, True, False, False, True, True]
    assert (distinct.is_conflict(key("q1")), distinct.is_conflict(key("q2"))) == (False, True)
    assert distinct.counts() == RowCounts(rows=6, distinct=3, duplicates=2, conflicts=1, conflict_rows=2)


ROWS = st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 1), st.sampled_from([b"", b"x"]))


@given(st.lists(ROWS, max_size=40))
def test_counts_by_source_agree_with_counting_by_hand(rows):
    """rows: question, answer, source, columns."""
    distinct = Distinct()
    kept = [(q, s) for q, a, s, c in rows if distinct.add(key(str(q)), answer_key(a), s, c)]
    answers = defaultdict(set)
    for q, a, *_ in rows:
        answers[q].add(a)
    conflicts = {q for q, found in answers.items() if len(found) > 1}
    assert {q for q in answers if distinct.is_conflict(key(str(q)))} == conflicts
    for source in (0, 1):
        mine = [q for q, _, s, _ in rows if s == source]
        found = distinct.counts(source)
        in_conflict = [q for q in mine if q in conflicts]
        survivors = [q for q, s in kept if s == source and q not in conflicts]
        assert (found.rows, found.conflicts, found.conflict_rows) == (
            len(mine),
            len(set(in_conflict)),
            len(in_conflict),
        )
        assert found.duplicates == len(mine) - len(in_conflict) - len(survivors)
        assert found.rows == found.distinct - found.conflicts + found.duplicates + found.conflict_rows
