"""Turns plans, graphs and measurements into text and pictures."""
