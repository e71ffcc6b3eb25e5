"""Adapters to other libraries, each a few lines on that library's public API.

Importing `hytrain_fx` imports no module of this package, so none of those libraries.
"""
