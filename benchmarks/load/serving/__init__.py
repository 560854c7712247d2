"""HTTP servers under load: throughput and latency against the number of concurrent requests, measured by AIPerf."""
