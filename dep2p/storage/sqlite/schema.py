"""The tables of a queues' file, version by version, and the checksums of their small rows.

SQLite finds damage of its pages, not of their contents.
"""

import zlib
from typing import Final

SCHEMA_1: Final = """
create table definitions(key text primary key, value blob not null) without rowid;
create table messages(id integer primary key, packed integer not null, meta blob not null, body blob not null);
create table partitions(partition integer primary key, last_seq integer not null, trimmed integer not null,
    items integer not null, bytes integer not null);
create table cursors(channel integer not null, partition integer not null, floor integer not null,
    handed_out integer not null, primary key (channel, partition)) without rowid;
create table done(channel integer not null, partition integer not null, low integer not null, high integer not null,
    primary key (channel, partition, low)) without rowid;
create table states(channel integer not null, partition integer not null, seq integer not null,
    attempts integer not null, due_us integer not null, history blob not null,
    primary key (channel, partition, seq)) without rowid;
create table dead(channel integer not null, id integer not null, partition integer not null, seq integer not null,
    died_us integer not null, attempts integer not null, meta blob not null, body blob not null, history blob not null,
    primary key (channel, id)) without rowid;
"""
SCHEMA_2: Final = """
create table last_dead(channel integer primary key, id integer not null);
insert into last_dead select channel, max(id) from dead group by channel;
create table owner(clean integer not null);
insert into owner values (1);
"""
SCHEMA_3: Final = """
alter table messages rename column packed to form;
alter table definitions add column sum integer;
alter table partitions add column sum integer;
alter table cursors add column sum integer;
alter table done add column sum integer;
alter table states add column sum integer;
alter table dead add column sum integer;
drop table owner;
"""
"""Adds checksums (`row_sum`); the migration fills in those of existing rows."""
_SCHEMA_4: Final = """
create table segments(id integer primary key, items integer not null, bytes integer not null, sum integer not null,
    data blob not null);
"""
"""Adds segments (segments.py); the migration moves the rows of ``messages`` there, and drops that table."""
MIGRATIONS: Final = (SCHEMA_1, SCHEMA_2, SCHEMA_3, _SCHEMA_4)
"""Statements that lead from version n to n + 1."""
SCHEMA_VERSION: Final = len(MIGRATIONS)
DAMAGED_META: Final = b""
"""The meta of a damaged message or dead letter: the core drops the message, and logs it."""


def row_sum(numbers: tuple[object, ...], *blobs: object) -> int:
    """Return the checksum of a small row, a number for any damaged fields."""
    total = zlib.crc32(repr(numbers).encode())
    for blob in blobs:
        total = zlib.crc32(blob if isinstance(blob, bytes) else repr(blob).encode(), total)
    return total
