"""Many requests at a time: throughput, latency, shared prefixes, and a queueing simulation."""
