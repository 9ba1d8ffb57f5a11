"""Using a queue that another node stores: link, publisher, consumer, and where its broker is."""
