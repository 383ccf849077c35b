"""Jobs of /generate as rows, so that every controller knows them and none is lost with one."""
