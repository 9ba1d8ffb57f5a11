"""The queues of one realm: the composition of the packages beside this one."""
