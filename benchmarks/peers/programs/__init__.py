"""One program per peer. Each runs in the environment of its peer and answers the driver by peers/protocol.py."""
