"""Graph passes: each takes a valid FX graph and returns a valid FX graph, and decides nothing."""
