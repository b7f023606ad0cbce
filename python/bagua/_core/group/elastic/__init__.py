"""Groups that outlive members: who lives, who belongs, and how a process comes back."""
