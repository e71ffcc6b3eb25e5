"""Adapters to other libraries, each a few lines on that library's public API.

Importing a module here imports none of them: what is adapted is handed over.
"""
