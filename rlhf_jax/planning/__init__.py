"""What a job needs, found out by compiling its programs from shapes alone: memory, collectives, seconds."""
