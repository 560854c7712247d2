"""Whether proposals that are planned by cost are faster than proposals of a fixed size."""
