"""The stores of queues and outboxes: contracts, commit loop, memory, and a package per database."""
