"""Offsets of clocks from readings and from delays."""

from random import Random

from dep2p.spark_analytics.metrics.clocks import Edge, edges_of_delays, offsets


def test_offsets_come_along_the_most_exact_readings() -> None:
    edges = [Edge(1, 2, 5_000, 10), Edge(2, 3, 0, 10), Edge(1, 3, 900_000, 50_000), Edge(3, 4, -5_000, 10)]
    found = offsets(edges, floor_us=1_000)
    assert found in ({2: 5_000, 3: 5_000}, {1: -5_000, 4: -5_000})


def test_parts_without_readings_between_them_keep_their_own_middle() -> None:
    found = offsets([Edge(1, 2, 7_000_000, 1), Edge(10, 11, 3_000_000, 1)], floor_us=1_000)
    assert found == {2: 7_000_000, 11: 3_000_000}


def test_clocks_are_found_from_delays_to_within_the_asymmetry_of_paths() -> None:
    rng = Random(5)
    ahead = {node: 0 for node in range(12)} | {3: 3_600_000_000, 7: -90_000_000}
    links: list[tuple[int, int, int]] = []
    for a in range(12):
        for b in (a + 1) % 12, (a + 5) % 12:
            for source, target in ((a, b), (b, a)):
                links.append((source, target, rng.randrange(5_000, 40_000) + ahead[target] - ahead[source]))
    found = offsets(edges_of_delays(links), floor_us=200_000)
    assert found.keys() == {3, 7}
    assert all(abs(found[node] - ahead[node]) < 100_000 for node in found)


def test_good_clocks_are_left_alone() -> None:
    links = [(a, b, 20_000 + 1_000 * a) for a in range(5) for b in range(5) if a != b]
    assert offsets(edges_of_delays(links), floor_us=50_000) == {}


def test_paths_that_are_slower_one_way_make_no_offsets() -> None:
    rng = Random(2)
    links: list[tuple[int, int, int]] = []
    for node in range(60):
        links += [(node, node + 1, rng.randrange(1_000, 4_000)), (node + 1, node, rng.randrange(30_000, 60_000))]
    assert offsets(edges_of_delays(links), floor_us=50_000) == {}


def test_a_leaf_that_only_receives_is_found_when_it_is_far_off() -> None:
    links = [(1, 2, 10_000), (2, 1, 12_000), (2, 3, 3_600_011_000)]
    assert offsets(edges_of_delays(links), floor_us=50_000).keys() == {3}
