"""What a pass and a round cost: time, memory bandwidth, memory."""
