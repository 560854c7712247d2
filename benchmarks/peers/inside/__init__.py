"""What runs in the environments of peers, with their libraries and the standard one alone."""
