"""Any torch optimizer, one parameter at a time: its step traced into a graph of torch operations where it can be, else run as it is."""
