"""Order by key: its rate, its crash test, its failover test."""
