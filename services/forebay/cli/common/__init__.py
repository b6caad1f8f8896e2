"""What commands share: errors, terminals, clusters, recordings, pages."""
