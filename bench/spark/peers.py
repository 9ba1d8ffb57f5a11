"""The peers of the Spark benchmark: the same metrics in DuckDB's SQL, from silver or from the raw files.

``python -m bench.spark.peers duckdb-raw DIR`` is the cold peer, a process of its own.
"""

import sys
import time
from typing import Any, Final

from dep2p.spark_analytics.ingest.silver import NESTED
from dep2p.traces.schema import KINDS, columns

_KINDS: Final = {name: number for number, name in enumerate(KINDS)}

_TABLES: Final = """
CREATE TEMP TABLE activity AS
  SELECT node_id, run, source_id, t // {fine} AS bucket, count(*) AS events, min(t) AS first_t, max(t) AS last_t,
    min(seq) AS first_seq, max(seq) AS last_seq, max(v) AS version, min(v) AS oldest_version,
    count_if(k = {publish}) AS publishes, count_if(k = {deliver}) AS delivers, count_if(k = {duplicate}) AS duplicates,
    count_if(k = {reject}) AS rejects, count_if(k = {drop_rpc}) AS drops, count_if(k = {node_start}) AS starts,
    count_if(k = {node_stop}) AS stops
  FROM events GROUP BY ALL;
CREATE TEMP TABLE runs AS
  SELECT node_id, run, min(first_t) AS first_t, max(last_t) AS last_t FROM activity GROUP BY ALL;
CREATE TEMP TABLE copies AS
  SELECT node_id, peer_id, topic_id, count_if(k = {publish}) AS publishes, count_if(k = {deliver}) AS firsts,
    count_if(k = {duplicate}) AS duplicates, count_if(k = {reject}) AS rejects,
    sum(size) FILTER (k = {duplicate}) AS duplicate_bytes, sum(size) FILTER (k = {deliver}) AS first_bytes
  FROM messages GROUP BY ALL;
CREATE TEMP TABLE rejects AS
  SELECT node_id, peer_id, topic_id, reason, count(*) AS n FROM messages WHERE k = {reject} GROUP BY ALL;
CREATE TEMP TABLE rpcs_total AS
  SELECT node_id, peer_id, k, count(*) AS rpcs, sum(messages) AS messages, sum(message_bytes) AS message_bytes,
    sum(control_bytes) AS control_bytes, sum(ihave) AS ihave, sum(grafts) AS grafts, sum(prunes) AS prunes,
    sum(len(iwant)) AS iwant, sum(len(idontwant)) AS idontwant
  FROM rpcs GROUP BY ALL;
CREATE TEMP TABLE drops AS
  SELECT t // {bucket} AS bucket, node_id, peer_id, count(*) AS n FROM rpcs WHERE k = {drop_rpc} GROUP BY ALL;
CREATE TEMP TABLE asked AS
  SELECT node_id, peer_id, msg_id, min(t) AS asked_t FROM (
    SELECT node_id, peer_id, unnest(iwant) AS msg_id, t FROM rpcs WHERE k = {send_rpc} AND iwant IS NOT NULL)
  GROUP BY ALL;
CREATE TEMP TABLE idontwant AS
  SELECT node_id, peer_id, msg_id, min(t) AS sent_t FROM (
    SELECT node_id, peer_id, unnest(idontwant) AS msg_id, t FROM rpcs WHERE k = {send_rpc} AND idontwant IS NOT NULL)
  GROUP BY ALL;
CREATE TEMP TABLE recovered AS
  SELECT topic_id, count(*) AS n FROM messages m JOIN asked a USING (node_id, peer_id, msg_id)
  WHERE m.k = {deliver} AND asked_t <= m.t GROUP BY ALL;
CREATE TEMP TABLE late AS
  SELECT count(*) AS n FROM messages m JOIN idontwant USING (node_id, peer_id, msg_id)
  WHERE m.k = {duplicate} AND sent_t <= m.t;
CREATE TEMP TABLE subs AS
  SELECT topic_id, node_id, t AS begin_t, coalesce(next_t, last_t) AS end_t FROM (
    SELECT *, lead(t) OVER (PARTITION BY node_id, run, topic_id ORDER BY t, seq) AS next_t
    FROM mesh WHERE k IN ({join}, {leave})) JOIN runs USING (node_id, run) WHERE k = {join};
CREATE TEMP TABLE pub AS
  SELECT msg_id, any_value(topic_id) AS topic_id, arg_min(node_id, t) AS publisher_id, min(t) AS t0
  FROM messages WHERE k = {publish} GROUP BY msg_id;
CREATE TEMP TABLE del AS
  SELECT d.msg_id, d.node_id, arg_min(d.peer_id, d.t) AS parent_id, min(d.t) AS t,
    any_value(publisher_id) AS publisher_id, any_value(p.topic_id) AS topic_id, any_value(t0) AS t0
  FROM messages d JOIN pub p USING (msg_id)
  WHERE d.k = {deliver} AND d.peer_id IS NOT NULL AND d.node_id <> publisher_id GROUP BY ALL;
CREATE TEMP TABLE due AS
  SELECT DISTINCT p.msg_id, s.node_id, p.t0 FROM pub p JOIN subs s
  ON s.topic_id = p.topic_id AND s.begin_t <= p.t0 AND s.end_t >= p.t0 + {settle} AND s.node_id <> p.publisher_id;
CREATE TEMP TABLE depth AS
  WITH RECURSIVE walk AS (
    SELECT msg_id, node_id, 1 AS hops FROM del WHERE parent_id = publisher_id
    UNION ALL
    SELECT d.msg_id, d.node_id, w.hops + 1 FROM walk w
    JOIN del d ON d.msg_id = w.msg_id AND d.parent_id = w.node_id AND d.parent_id <> d.publisher_id)
  SELECT * FROM walk;
CREATE TEMP TABLE hops AS SELECT topic_id, hops, count(*) AS n FROM depth JOIN pub USING (msg_id) GROUP BY ALL;
CREATE TEMP TABLE latency AS
  SELECT topic_id, publisher_id, lower, count(*) AS n FROM (
    SELECT topic_id, publisher_id, (late >> shift) << shift AS lower FROM (
      SELECT topic_id, publisher_id, t - t0 AS late, greatest(floor(log2(greatest(t - t0, 1)))::INT - 7, 0) AS shift
      FROM del)) GROUP BY ALL;
CREATE TEMP TABLE spread AS
  SELECT msg_id, count(*) AS eligible, count(t) AS reached,
    list_sort(list(t - d.t0) FILTER (t IS NOT NULL)) AS times,
    times[(eligible * 50 + 99) // 100] AS t50, times[(eligible * 90 + 99) // 100] AS t90,
    times[(eligible * 99 + 99) // 100] AS t99, times[eligible] AS t100
  FROM due LEFT JOIN del d USING (msg_id, node_id) GROUP BY msg_id;
CREATE TEMP TABLE ends AS
  SELECT d.msg_id, count(*) AS delivered, max(d.t - d.t0) AS last_us, sum(d.t - d.t0) AS latency_sum,
    arg_max(hops, d.t) AS last_hops,
    count(DISTINCT CASE WHEN p.t IS NOT NULL OR d.parent_id = d.publisher_id THEN d.parent_id END) AS parents
  FROM del d LEFT JOIN depth w USING (msg_id, node_id)
  LEFT JOIN del p ON p.msg_id = d.msg_id AND p.node_id = d.parent_id GROUP BY d.msg_id;
CREATE TEMP TABLE links AS
  SELECT d.parent_id AS from_id, d.node_id AS to_id, count(*) AS firsts,
    sum(d.t - coalesce(p.t, d.t0)) AS delay_sum, min(d.t - coalesce(p.t, d.t0)) AS delay_min,
    max(d.t - coalesce(p.t, d.t0)) AS delay_max
  FROM del d LEFT JOIN del p ON p.msg_id = d.msg_id AND p.node_id = d.parent_id
  WHERE p.t IS NOT NULL OR d.parent_id = d.publisher_id GROUP BY ALL;
CREATE TEMP TABLE node_coverage AS
  SELECT due.node_id, due.t0 // {bucket} AS bucket, count(*) AS eligible, count(t) AS reached,
    sum(t - d.t0 - t50) AS late_sum
  FROM due LEFT JOIN del d USING (msg_id, node_id) JOIN spread USING (msg_id) GROUP BY ALL;
CREATE TEMP TABLE sessions AS
  SELECT node_id, run, topic_id, peer_id, t AS begin_t, coalesce(next_t, last_t) AS end_t FROM (
    SELECT *, lead(t) OVER (PARTITION BY node_id, run, topic_id, peer_id ORDER BY t, seq) AS next_t
    FROM mesh WHERE k IN ({graft}, {prune})) JOIN runs USING (node_id, run) WHERE k = {graft};
CREATE TEMP TABLE samples AS
  SELECT DISTINCT topic_id, node_id, peer_id,
    unnest(range((begin_t - 1) // {bucket}, (end_t - 1) // {bucket})) AS bucket FROM sessions;
CREATE TEMP TABLE degree AS
  SELECT topic_id, bucket, count(*) AS nodes, min(n) AS lowest, avg(n) AS mean, max(n) AS highest FROM (
    SELECT d.topic_id, d.bucket, d.node_id, count(s.peer_id) AS n FROM (
      SELECT DISTINCT topic_id, node_id, unnest(range((begin_t - 1) // {bucket}, (end_t - 1) // {bucket})) AS bucket
      FROM subs) d LEFT JOIN samples s USING (topic_id, bucket, node_id) GROUP BY ALL) GROUP BY ALL;
CREATE TEMP TABLE symmetry AS
  SELECT topic_id, bucket, sum(ends) AS links, count_if(ends = 1) AS one_way FROM (
    SELECT topic_id, bucket, least(node_id, peer_id) AS a, greatest(node_id, peer_id) AS b, count(*) AS ends
    FROM samples GROUP BY ALL) GROUP BY ALL;
CREATE TEMP TABLE churn AS
  SELECT node_id, topic_id, count_if(k = {graft}) AS grafts, count_if(k = {prune}) AS prunes
  FROM mesh WHERE k IN ({graft}, {prune}) GROUP BY ALL;
"""

RESULTS: Final = (
    *("activity", "copies", "rejects", "rpcs_total", "drops", "recovered", "late", "subs", "hops", "latency", "spread"),
    *("ends", "links", "node_coverage", "degree", "symmetry", "churn"),
)

_PARTS: Final = {
    "messages": ("publish", "reject", "duplicate", "deliver"),
    "rpcs": ("recv_rpc", "send_rpc", "drop_rpc"),
    "mesh": ("add_peer", "remove_peer", "join", "leave", "graft", "prune", "mesh"),
}


def duckdb_metrics(source: str, *, raw: bool, bucket_us: int, settle_us: int = 3_000_000, fine_us: int) -> Any:
    """Run all of it on two threads; gives the connection, whose tables are `RESULTS`."""
    import duckdb

    connection = duckdb.connect(config={"threads": 2})
    if raw:
        _from_raw(connection, source)
    else:
        files = f"read_parquet('{source}/**/*.parquet', hive_partitioning = true)"
        connection.execute(f"CREATE VIEW events AS SELECT * FROM {files} WHERE part <> 'bad'")
    for name, kinds in _PARTS.items():
        codes = ", ".join(str(_KINDS[kind]) for kind in kinds)
        chosen = f"k IN ({codes})" if raw else f"part = '{name}'"
        fields = "".join(f", of_{name}.{field}" for field in NESTED.get(name, ())) if not raw else ""
        connection.execute(f"CREATE VIEW {name} AS SELECT *{fields} FROM events WHERE {chosen}")
    connection.execute(_TABLES.format(**_KINDS, bucket=bucket_us, settle=settle_us, fine=fine_us))
    for name in RESULTS:
        connection.sql(f"SELECT * FROM {name}").to_arrow_table()
    return connection


def _from_raw(connection: Any, source: str) -> None:
    wanted = {name: sql for name, sql in columns().items() if name not in ("attrs",)}
    types = ", ".join(f"'{name}': '{_duckdb_type(sql)}'" for name, sql in wanted.items())
    codes = ", ".join(f"'{name}': {number}" for name, number in _KINDS.items())
    key = "CASE WHEN {0} IS NOT NULL THEN (hash({0}) >> 1)::BIGINT END AS {0}_id"
    ids = ", ".join(key.format(name) for name in ("node", "peer", "topic", "msg"))
    connection.execute(
        f"CREATE TEMP TABLE events AS SELECT v, seq, t, MAP {{{codes}}}[kind]::TINYINT AS k, {ids}, size, reason, "
        "0 AS run, (hash(filename) >> 1)::BIGINT AS source_id, message_bytes, control_bytes, "
        "len(messages) AS messages, len(grafts) AS grafts, len(prunes) AS prunes, "
        "list_sum(list_transform(ihave, lambda x: x['count']))::BIGINT AS ihave, "
        "list_transform(iwant, lambda x: (hash(x) >> 1)::BIGINT) AS iwant, "
        "list_transform(idontwant, lambda x: (hash(x) >> 1)::BIGINT) AS idontwant "
        f"FROM read_json('{source}/**/*.ndjson.zst', format = 'newline_delimited', compression = 'zstd', "
        f"columns = {{{types}}}, filename = true)"
    )


def _duckdb_type(sql: str) -> str:
    if sql.startswith("ARRAY<"):
        return _duckdb_type(sql[6:-1]) + "[]"
    if sql.startswith("STRUCT<"):
        parts = [part.partition(": ") for part in _split(sql[7:-1])]
        return "STRUCT(" + ", ".join(f'"{name}" {_duckdb_type(of)}' for name, _, of in parts) + ")"
    return {"STRING": "VARCHAR"}.get(sql, sql)


def _split(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for place, char in enumerate(text):
        depth += (char == "<") - (char == ">")
        if char == "," and not depth:
            parts.append(text[start:place].strip())
            start = place + 1
    return [*parts, text[start:].strip()]


if __name__ == "__main__":
    begun = time.perf_counter()
    if sys.argv[1] == "duckdb-raw":
        duckdb_metrics(sys.argv[2], raw=True, bucket_us=int(sys.argv[3]), fine_us=int(sys.argv[4]))
    print(round(time.perf_counter() - begun, 3))
