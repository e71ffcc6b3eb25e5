"""Graph passes: each takes a valid FX graph and returns a valid FX graph, and decides nothing."""

# The link `passes` at the top of the repository leads here; through it every module would load, and register its ops, a second time.
if __name__ != "hytrain_fx.passes":
    raise ImportError(f"imported as {__name__!r} through a link to hytrain_fx/passes; expected `import hytrain_fx.passes`", name=__name__)
