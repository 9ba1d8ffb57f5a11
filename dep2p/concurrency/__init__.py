"""Small trio helpers that are used everywhere: deadlines, wait queues, exception groups."""
