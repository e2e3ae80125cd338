from __future__ import annotations

import pytest

from ostler.store import queries


def test_both_dialects_have_the_same_statements_with_the_same_parameters() -> None:
    assert queries.unequal() == []


@pytest.mark.parametrize(
    ("sqlite", "postgres"),
    [
        ("SELECT :a", "SELECT :b"),
        ("SELECT ?, ?", "SELECT row ->> 0 FROM jsonb_array_elements(:rows) AS row"),
        ("SELECT 1", None),
        ("SELECT ':a'", "SELECT :a"),
    ],
)
def test_a_statement_that_differs_is_named(sqlite: str, postgres: str | None) -> None:
    other = {} if postgres is None else {"one": postgres}
    assert [text.partition(" ")[0] for text in queries.differences({"one": sqlite}, other)] == ["one"]


def test_texts_casts_and_comments_are_no_parameters() -> None:
    sql = "SELECT ':no', x::text, :yes -- and :neither\n FROM t"
    assert queries.parameters(sql) == (frozenset({"yes"}), 0)
