"""Errors that only the client library raises. They extend the tree of ``cutwater.errors``.

::

    InvalidArgument
     ├─ InvalidRecord        invalid_record        a record is not as its topic demands; says which row and column
     └─ RecordTooLarge       record_too_large      a record or a batch exceeds the limit; nothing was sent
    Refused
     ├─ IncompatibleSchema   incompatible_schema   a new schema that readers of the old one could not live with
     └─ ClientClosed         client_closed         a client, producer or subscription was closed, or left by a fork; or
                                                   the process that had the log open has closed it
"""

from __future__ import annotations

from cutwater.errors import InvalidArgument, Refused


class InvalidRecord(InvalidArgument):
    """A record does not fit its topic. ``row`` is None if a column as a whole is wrong, and ``column`` is empty if the
    error is not about a single column. ``what`` is the message without both, for callers that name them differently."""

    code = "invalid_record"

    def __init__(self, message: str, *, column: str = "", row: int | None = None) -> None:
        where = ", ".join(
            part for part in (f"column {column!r}" if column else "", "" if row is None else f"row {row}") if part
        )
        super().__init__(f"{where}: {message}" if where else message)
        self.what, self.column, self.row = message, column, row


class RecordTooLarge(InvalidArgument):
    """A record or a batch exceeds the limit. ``row`` is None if the batch as a whole is too large. ``what`` is the
    message without the row."""

    code = "record_too_large"

    def __init__(self, row: int | None, size: int, limit: int) -> None:
        if row is None:
            self.what = f"the batch has {size} bytes, {limit} is the most: append it in parts"
            super().__init__(self.what)
        else:
            told = f"has {size} bytes, {limit} is the most: split it, or store it elsewhere and refer to it"
            self.what = f"this record {told}"
            super().__init__(f"row {row} {told}")
        self.row, self.size, self.limit = row, size, limit


class IncompatibleSchema(Refused):
    code = "incompatible_schema"


class ClientClosed(Refused):
    code = "client_closed"
