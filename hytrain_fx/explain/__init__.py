"""What `explain`, `record` and `inspect` show.

Is given a session's values. Returns texts, pages, pictures and JSON. Never changes what runs.
"""
