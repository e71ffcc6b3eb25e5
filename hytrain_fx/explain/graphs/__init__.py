"""Graphs as they are after each pass: texts, pages, JSON."""
