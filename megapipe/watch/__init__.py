"""Who looks for ranks that hang: each rank notes what it does in a file that is mapped into its
memory, and a process of the node reads these files."""
