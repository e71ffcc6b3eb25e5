"""The report about the plan in force: values, then texts."""
