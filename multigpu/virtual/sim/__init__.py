"""The simulated machine: clock, memory meters, costs of operations, network, timeline."""
