"""Our nodes go in, and a user's.

Is given a captured graph and a list of passes. Returns the same graph with their nodes in it,
checked after each pass, and a record of what each did. Never decides what is updated where: the
nodes ask that at run time.
"""

# The link `passes` at the top of the repository leads here; through it every module would load, and
# register its ops, a second time.
if __name__ != "hytrain_fx.passes":
    raise ImportError(f"imported as {__name__!r} through a link to hytrain_fx/passes; expected `import hytrain_fx.passes`", name=__name__)
