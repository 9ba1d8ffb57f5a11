"""Polars as a peer of the Spark benchmark: the tables of `bench.spark.peers`, from silver, by expressions."""

from pathlib import Path
from typing import Any, Final

from bench.spark.peers import RESULTS
from dep2p.traces.schema import KINDS

_K: Final = {name: number for number, name in enumerate(KINDS)}


def polars_metrics(source: str, *, bucket_us: int, fine_us: int, settle_us: int = 3_000_000) -> dict[str, Any]:
    """The tables of `RESULTS` as data frames; on as many threads as POLARS_MAX_THREADS said before the first import."""
    import polars as pl

    col, n = pl.col, pl.len().alias("n")

    def scan(part: str) -> Any:
        return pl.scan_parquet(f"{source}/part={part}/**/*.parquet")

    def is_(kind: str) -> Any:
        return col("k") == _K[kind]

    def counts(**kinds: str) -> list[Any]:
        return [is_(kind).sum().alias(name) for name, kind in kinds.items()]

    def rises(begin: str, end: str, *keys: str) -> Any:
        """From one kind of event to the next of either; the last one lasts to the end of its run."""
        following = mesh.filter(is_(begin) | is_(end)).sort("t", "seq")
        following = following.with_columns(col("t").shift(-1).over(*keys).alias("next_t")).filter(is_(begin))
        following = following.join(runs.lazy(), on=["node_id", "run"])
        return following.select(*keys, col("t").alias("begin_t"), pl.coalesce("next_t", "last_t").alias("end_t"))

    def buckets(spans: Any) -> Any:
        """A row for each sample in each span."""
        low, high = (col("begin_t") - 1) // bucket_us, (col("end_t") - 1) // bucket_us
        return spans.with_columns(pl.int_ranges(low, high).alias("bucket")).explode("bucket").drop_nulls("bucket")

    parts = [scan(part) for part in ("messages", "rpcs", "mesh", "app", "node") if _there(source, part)]
    messages, mesh = scan("messages"), scan("mesh")
    rpcs = scan("rpcs").unnest("of_rpcs")
    named = {"publishes": "publish", "delivers": "deliver", "duplicates": "duplicate", "rejects": "reject"}
    named |= {"drops": "drop_rpc", "starts": "node_start", "stops": "node_stop"}
    columns = ("node_id", "run", "source_id", "t", "seq", "v", "k")
    activity = (
        pl.concat([part.select(columns) for part in parts])
        .group_by("node_id", "run", "source_id", bucket=col("t") // fine_us)
        .agg(
            pl.len().alias("events"),
            *(getattr(col(of), how)().alias(f"{name}_{of}") for of in ("t", "seq") for name, how in _ENDS),
            col("v").max().alias("version"),
            col("v").min().alias("oldest_version"),
            *counts(**named),
        )
        .collect()
    )
    runs = activity.group_by("node_id", "run").agg(col("first_t").min(), col("last_t").max())
    subs = rises("join", "leave", "node_id", "run", "topic_id").collect()
    sessions = rises("graft", "prune", "node_id", "run", "topic_id", "peer_id").collect()

    pub = (
        messages.filter(is_("publish"))
        .group_by("msg_id")
        .agg(
            col("topic_id").first(),
            col("node_id").get(col("t").arg_min()).alias("publisher_id"),
            col("t").min().alias("t0"),
        )
        .collect()
    )
    first = (
        messages.filter(is_("deliver") & col("peer_id").is_not_null())
        .select("msg_id", "node_id", "peer_id", "t")
        .join(pub.lazy(), on="msg_id")
        .filter(col("node_id") != col("publisher_id"))
        .group_by("msg_id", "node_id")
        .agg(
            col("peer_id").get(col("t").arg_min()).alias("parent_id"),
            col("t").min(),
            col("publisher_id").first(),
            col("topic_id").first(),
            col("t0").first(),
        )
        .collect()
    )
    due = (
        pub.lazy()
        .join(subs.lazy(), on="topic_id")
        .filter(
            (col("begin_t") <= col("t0"))
            & (col("end_t") >= col("t0") + settle_us)
            & (col("node_id") != col("publisher_id"))
        )
        .select("msg_id", "node_id", "t0")
        .unique()
        .collect()
    )
    depth = _depth(pl, first)
    late = col("t") - col("t0")
    shift = (late.clip(1).log(2).floor().cast(pl.Int64) - 7).clip(0)
    parent = first.select("msg_id", col("node_id").alias("parent_id"), col("t").alias("parent_t"))
    linked = first.join(parent, on=["msg_id", "parent_id"], how="left").with_columns(
        (col("parent_t").is_not_null() | (col("parent_id") == col("publisher_id"))).alias("is_link"),
        (col("t") - pl.coalesce("parent_t", "t0")).alias("delay"),
    )
    reach = due.join(first.select("msg_id", "node_id", "t"), on=["msg_id", "node_id"], how="left")
    spread = reach.group_by("msg_id").agg(
        pl.len().cast(pl.Int64).alias("eligible"),
        col("t").count().alias("reached"),
        late.drop_nulls().sort().alias("times"),
    )
    spread = spread.with_columns(
        *(
            col("times").list.get((col("eligible") * share + 99) // 100 - 1, null_on_oob=True).alias(f"t{share}")
            for share in (50, 90, 99)
        ),
        col("times").list.get(col("eligible") - 1, null_on_oob=True).alias("t100"),
    )
    samples = buckets(sessions).select("topic_id", "node_id", "peer_id", "bucket").unique()
    degrees = (
        buckets(subs)
        .select("topic_id", "node_id", "bucket")
        .unique()
        .join(
            samples.group_by("topic_id", "bucket", "node_id").agg(n), on=["topic_id", "bucket", "node_id"], how="left"
        )
    )
    ends = pl.concat_list("node_id", "peer_id").list
    sent = rpcs.filter(is_("send_rpc"))

    def listed(name: str, at: str) -> Any:
        asked = sent.select("node_id", "peer_id", "t", col(name).alias("msg_id")).explode("msg_id").drop_nulls("msg_id")
        return asked.group_by("node_id", "peer_id", "msg_id").agg(col("t").min().alias(at))

    def after(kind: str, name: str, at: str) -> Any:
        return (
            messages.filter(is_(kind))
            .join(listed(name, at), on=["node_id", "peer_id", "msg_id"])
            .filter(col(at) <= col("t"))
        )

    size = col("size")
    lazy = {
        "copies": messages.group_by("node_id", "peer_id", "topic_id").agg(
            *counts(publishes="publish", firsts="deliver", duplicates="duplicate", rejects="reject"),
            size.filter(is_("duplicate")).sum().alias("duplicate_bytes"),
            size.filter(is_("deliver")).sum().alias("first_bytes"),
        ),
        "rejects": messages.filter(is_("reject")).group_by("node_id", "peer_id", "topic_id", "reason").agg(n),
        "rpcs_total": rpcs.group_by("node_id", "peer_id", "k").agg(
            pl.len().alias("rpcs"),
            col("messages", "message_bytes", "control_bytes", "ihave", "grafts", "prunes").sum(),
            col("iwant", "idontwant").list.len().sum(),
        ),
        "drops": rpcs.filter(is_("drop_rpc")).group_by("node_id", "peer_id", bucket=col("t") // bucket_us).agg(n),
        "recovered": after("deliver", "iwant", "asked_t").group_by("topic_id").agg(n),
        "late": after("duplicate", "idontwant", "told_t").select(n),
        "hops": depth.lazy().join(pub.lazy(), on="msg_id").group_by("topic_id", "hops").agg(n),
        "latency": first.lazy().group_by("topic_id", "publisher_id", lower=(late // 2**shift) * 2**shift).agg(n),
        "ends": linked.lazy()
        .join(depth.lazy(), on=["msg_id", "node_id"], how="left")
        .group_by("msg_id")
        .agg(
            pl.len().alias("delivered"),
            late.max().alias("last_us"),
            late.sum().alias("latency_sum"),
            col("hops").get(col("t").arg_max()).alias("last_hops"),
            col("parent_id").filter("is_link").n_unique().alias("parents"),
        ),
        "links": linked.lazy()
        .filter("is_link")
        .group_by(from_id="parent_id", to_id="node_id")
        .agg(
            pl.len().alias("firsts"),
            col("delay").sum().alias("delay_sum"),
            col("delay").min().alias("delay_min"),
            col("delay").max().alias("delay_max"),
        ),
        "node_coverage": reach.lazy()
        .join(spread.lazy().select("msg_id", "t50"), on="msg_id")
        .group_by("node_id", bucket=col("t0") // bucket_us)
        .agg(
            pl.len().alias("eligible"), col("t").count().alias("reached"), (late - col("t50")).sum().alias("late_sum")
        ),
        "degree": degrees.lazy()
        .with_columns(col("n").fill_null(0))
        .group_by("topic_id", "bucket")
        .agg(
            pl.len().alias("nodes"),
            col("n").min().alias("lowest"),
            col("n").mean().alias("mean"),
            col("n").max().alias("highest"),
        ),
        "symmetry": samples.lazy()
        .group_by("topic_id", "bucket", a=ends.min(), b=ends.max())
        .agg(pl.len().alias("ends"))
        .group_by("topic_id", "bucket")
        .agg(col("ends").sum().alias("links"), (col("ends") == 1).sum().alias("one_way")),
        "churn": mesh.filter(is_("graft") | is_("prune"))
        .group_by("node_id", "topic_id")
        .agg(*counts(grafts="graft", prunes="prune")),
    }
    found: dict[str, Any] = dict(zip(lazy, pl.collect_all(list(lazy.values())), strict=True))
    found |= {"activity": activity, "subs": subs, "spread": spread}
    return {name: found[name] for name in RESULTS}


_ENDS: Final = (("first", "min"), ("last", "max"))


def _there(source: str, part: str) -> bool:
    return Path(source, f"part={part}").is_dir()


def _depth(pl: Any, first: Any) -> Any:
    """How many hops each first delivery was from the publisher: a join for each hop."""
    tree = first.select("msg_id", "node_id", "parent_id", "publisher_id")
    reached = tree.filter(pl.col("parent_id") == pl.col("publisher_id")).select("msg_id", "node_id")
    rest = tree.filter(pl.col("parent_id") != pl.col("publisher_id"))
    found: list[Any] = []
    while reached.height:
        found.append(reached.with_columns(hops=pl.lit(len(found) + 1, dtype=pl.Int32)))
        reached = rest.join(reached.rename({"node_id": "parent_id"}), on=["msg_id", "parent_id"]).select(
            "msg_id", "node_id"
        )
    empty = tree.clear().select("msg_id", "node_id").with_columns(hops=pl.lit(0, dtype=pl.Int32))
    return pl.concat([empty, *found])
