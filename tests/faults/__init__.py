"""Tests that kill and corrupt for minutes: ``make faults``."""
