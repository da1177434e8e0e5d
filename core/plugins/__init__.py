"""Tools for parts: what is installed, what is wrong with it, whether it is right, and a start for a new one."""
