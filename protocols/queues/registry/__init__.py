"""The queues of a store by name: their definitions, the values that a store keeps of them, their makers."""
