"""``docs/access-table.md`` is what the tables say now."""

from __future__ import annotations

from tests import access_table


def test_the_page_is_up_to_date() -> None:
    found = access_table.PAGE.read_text(encoding="utf-8")
    assert found == access_table.page(), f"the page is stale: `{access_table.COMMAND}` writes it again"


def test_the_page_has_every_method_and_request() -> None:
    text = access_table.PAGE.read_text(encoding="utf-8")
    assert [row.name for row in access_table.rows() if f"| `{row.name}` |" not in text] == []
