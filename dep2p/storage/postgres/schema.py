"""The tables of queues in PostgreSQL."""

from typing import Final

SCHEMA_VERSION: Final = 2
SCHEMA_BEFORE: Final = 1
"""The version without nodes that take turns; `open` migrates it."""

TURNS: Final = """
alter table owner add column holder text not null default '', add column renewed_at timestamptz not null default now(),
    add column lease_s double precision not null default 0;
create table terms(epoch bigint primary key, holder text not null, since timestamptz not null, batch bigint not null);
create table nodes(peer text primary key, seen_at timestamptz not null);
update owner set version = 2;
"""
"""The owner of the store. ``holder``: empty while there is none; ``batch`` of a term: the last written before it."""
TABLES: Final = """
create table owner(epoch bigint not null, batch bigint not null, version integer not null);
insert into owner values (0, 0, 1);
create table definitions(key text primary key, value bytea not null);
create table messages(partition bigint not null, seq bigint not null, meta bytea not null, body bytea not null,
    primary key (partition, seq));
create table partitions(partition bigint primary key, last_seq bigint not null, trimmed bigint not null,
    items bigint not null, bytes bigint not null);
create table cursors(channel bigint not null, partition bigint not null, floor bigint not null,
    handed_out bigint not null, primary key (channel, partition));
create table done(channel bigint not null, partition bigint not null, low bigint not null, high bigint not null,
    primary key (channel, partition, low));
create table states(channel bigint not null, partition bigint not null, seq bigint not null,
    attempts bigint not null, due_us bigint not null, history bytea not null, primary key (channel, partition, seq));
create table dead(channel bigint not null, id bigint not null, partition bigint not null, seq bigint not null,
    died_us bigint not null, attempts bigint not null, meta bytea not null, body bytea not null,
    history bytea not null, primary key (channel, id));
create table last_dead(channel bigint primary key, id bigint not null);
"""
