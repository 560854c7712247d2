"""What each weight format costs in quality and gains in time."""
