"""Bagua's algorithms: BaguaStrategy gives DDP one of them, by its name."""
