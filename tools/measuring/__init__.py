"""What all measuring programs share: processes, results that are kept, tables and pages."""
