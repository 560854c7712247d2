"""Draftwood's server and llama.cpp's under load: throughput and latency against the number of requests at a time."""
