"""Simulate a network of publishers.

Shows: simulate, Scenario, Report, Latency, Churn, Partition
"""

from dep2p.testing import Latency, Scenario, simulate

report = simulate(Scenario(nodes=50, publishers=5, messages=20, seed=1, latency=Latency("uniform", 0.01, 0.05)))
print(report.deliveries.ratio)  # 1.0
