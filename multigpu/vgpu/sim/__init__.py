"""The simulated machine: its clock, memory meters, kernel costs, network and timeline. No tensor here."""
