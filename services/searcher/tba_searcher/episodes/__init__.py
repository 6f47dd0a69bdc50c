"""Episodes: conversations of the policy with an environment, one token sequence after another."""
