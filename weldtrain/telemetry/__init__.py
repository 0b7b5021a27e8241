"""Clocks, machine counters and the run record."""
